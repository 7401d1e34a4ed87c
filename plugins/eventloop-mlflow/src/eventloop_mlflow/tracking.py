"""A run in MLflow's store: begun or found again, filled, ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from eventloop.toolbox import RunFolder
from eventloop_mlflow.names import Point

RUN_DIR = "eventloop.run_dir"
_PARAMS_AT_ONCE = 100


class TrackedRun:
    """A run in a store.

    Args:
        uri: of the store, as MLflow writes it.
        run_id: the run's.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self.run_id = run_id
        self._client = MlflowClient(uri)

    @classmethod
    def begin(
        cls, uri: str, experiment: str, run_name: str, run_dir: str, start_ms: int
    ) -> TrackedRun:
        """Begins a run that started at a time, in ms since 1970."""
        client = MlflowClient(uri)
        found = client.create_run(
            _experiment_id(client, uri, experiment),
            start_time=start_ms,
            tags={RUN_DIR: run_dir},
            run_name=run_name,
        )
        return cls(uri, found.info.run_id)

    @classmethod
    def again(
        cls, uri: str, experiment: str, run_id: str | None, run_dir: str
    ) -> TrackedRun | None:
        """Finds a run by its id, else by its folder; None where the store doesn't have it."""
        client = MlflowClient(uri)
        if run_id is not None:
            try:
                client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                return cls(uri, run_id)
        folder = run_dir.replace("'", "\\'")
        runs = client.search_runs(
            [_experiment_id(client, uri, experiment)], f"tags.`{RUN_DIR}` = '{folder}'"
        )
        return cls(uri, runs[0].info.run_id) if runs else None

    def points_from(self, step: int) -> list[tuple[str, int]]:
        """Returns name and step of each point that is there from a step on."""
        return [
            (name, one.step)
            for name in self._client.get_run(self.run_id).data.metrics
            for one in self._client.get_metric_history(self.run_id, name)
            if one.step >= step
        ]

    def describe(
        self, params: Mapping[str, str], tags: Mapping[str, str], manifest: Mapping[str, Any]
    ) -> None:
        """Writes parameters, tags and the manifest; a parameter that is there stays as it is."""
        there = self._client.get_run(self.run_id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in there]
        for some in _slices(new, _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=some)
        self._client.log_batch(self.run_id, tags=[RunTag(*one) for one in tags.items()])
        self._client.log_dict(self.run_id, dict(manifest), "manifest.json")

    def send(self, points: Sequence[Point]) -> None:
        """Writes points, at most `names.POINTS_AT_ONCE`, in one request."""
        metrics = [Metric(name, value, time_ms, step) for name, value, step, time_ms in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def add_text(self, path: str, text: str) -> None:
        """Writes a file of the run, over one of the same name."""
        self._client.log_text(self.run_id, text, path)

    def add_files(self, source: str, folder: str) -> None:
        """Copies a folder with its files; MLflow follows links, so that none may be in it."""
        files = RunFolder(path := Path(source))
        for name in files.names():
            files.check(name)
        self._client.log_artifacts(self.run_id, source, f"{folder}/{path.name}")

    def tag(self, name: str, value: str) -> None:
        """Sets a tag."""
        self._client.set_tag(self.run_id, name, value)

    def set_status(self, status: str) -> None:
        """Sets the run's status."""
        if status == "RUNNING":
            self._client.update_run(self.run_id, status)
        else:
            self._client.set_terminated(self.run_id, status)


def called(uri: str, run_id: str | None, method: str, args: Sequence[Any]) -> Any:
    """Returns what a method of a run returns; without a run, the id of the one it begins or finds."""
    if run_id is not None:
        return getattr(TrackedRun(uri, run_id), method)(*args)
    run: TrackedRun | None = getattr(TrackedRun, method)(uri, *args)
    return run and run.run_id


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # A database's artifacts would go where the process happens to be; a server knows a place.
    place = uri.removeprefix("sqlite:///")
    location = Path(place).absolute().with_name("mlartifacts").as_uri() if place != uri else None
    return str(client.create_experiment(name, artifact_location=location))


def _slices(values: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
