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
        uri: URI of the store, in MLflow's format.
        run_id: id of the run.
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
        created_run = client.create_run(
            _experiment_id(client, uri, experiment),
            start_time=start_ms,
            tags={RUN_DIR: run_dir},
            run_name=run_name,
        )
        return cls(uri, created_run.info.run_id)

    @classmethod
    def again(
        cls, uri: str, experiment: str, run_id: str | None, run_dir: str
    ) -> TrackedRun | None:
        """Finds a run by its id, else by its folder; None if the store doesn't have it."""
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
        """Returns name and step of each existing point from a step on."""
        return [
            (name, point.step)
            for name in self._client.get_run(self.run_id).data.metrics
            for point in self._client.get_metric_history(self.run_id, name)
            if point.step >= step
        ]

    def describe(
        self, params: Mapping[str, str], tags: Mapping[str, str], manifest: Mapping[str, Any]
    ) -> None:
        """Writes parameters, tags and the manifest; existing parameters stay unchanged."""
        existing_params = self._client.get_run(self.run_id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in existing_params]
        for params_slice in _slices(new, _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=params_slice)
        self._client.log_batch(self.run_id, tags=[RunTag(*tag) for tag in tags.items()])
        self._client.log_dict(self.run_id, dict(manifest), "manifest.json")

    def send(self, points: Sequence[Point]) -> None:
        """Writes points, at most `names.POINTS_AT_ONCE`, in a single request."""
        metrics = [Metric(name, value, time_ms, step) for name, value, step, time_ms in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def add_text(self, path: str, text: str) -> None:
        """Writes a file of the run, replacing a file of the same name."""
        self._client.log_text(self.run_id, text, path)

    def add_files(self, source: str, folder: str) -> None:
        """Copies a folder with its files; refuses links, which MLflow would follow."""
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
    """Calls a method of a run; without `run_id`, returns the id of the run that it begins or finds."""
    if run_id is not None:
        return getattr(TrackedRun(uri, run_id), method)(*args)
    run: TrackedRun | None = getattr(TrackedRun, method)(uri, *args)
    return run and run.run_id


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    existing_experiment = client.get_experiment_by_name(name)
    if existing_experiment is not None:
        return str(existing_experiment.experiment_id)
    # By default a database's artifacts go to the working directory; a server has its own location.
    database_path = uri.removeprefix("sqlite:///")
    location = (
        Path(database_path).absolute().with_name("mlartifacts").as_uri()
        if database_path != uri
        else None
    )
    return str(client.create_experiment(name, artifact_location=location))


def _slices(values: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
