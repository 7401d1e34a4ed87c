"""A run in MLflow's store: begun or found again, filled, ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from eventloop.toolbox.run_files import RunFolder
from eventloop_mlflow.names import Point, parameters, tags

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
RUN_DIR = "eventloop.run_dir"
# MLflow takes 1000 at once, and 1 MB.
POINTS_AT_ONCE = 500
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
        # What a killed process wrote after the checkpoint that this one goes on from.
        self._there: Counter[tuple[str, int]] = Counter()

    @classmethod
    def begin(
        cls, uri: str, experiment: str, run_name: str, run_dir: Path, start_ms: int
    ) -> TrackedRun:
        """Begins a run that started at a time, in ms since 1970."""
        client = MlflowClient(uri)
        found = client.create_run(
            _experiment_id(client, uri, experiment),
            start_time=start_ms,
            tags={RUN_DIR: str(run_dir)},
            run_name=run_name,
        )
        return cls(uri, found.info.run_id)

    @classmethod
    def again(
        cls, uri: str, experiment: str, run_id: str | None, run_dir: Path
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
        folder = str(run_dir).replace("'", "\\'")
        runs = client.search_runs(
            [_experiment_id(client, uri, experiment)], f"tags.`{RUN_DIR}` = '{folder}'"
        )
        return cls(uri, runs[0].info.run_id) if runs else None

    def leave_out(self, step: int, known: Mapping[str, int]) -> None:
        """Notes which points are there already from a step on: they will come once more.

        MLflow can't delete a point.

        Args:
            known: how many points of each name at this step won't come.
        """
        for name in self._client.get_run(self.run_id).data.metrics:
            for one in self._client.get_metric_history(self.run_id, name):
                if one.step >= step:
                    self._there[name, one.step] += 1
        self._there -= Counter({(name, step): number for name, number in known.items()})

    def describe(self, manifest: Mapping[str, Any]) -> None:
        """Writes parameters, tags and the manifest; a parameter that is there stays as it is."""
        there = self._client.get_run(self.run_id).data.params
        params = [
            Param(name, value) for name, value in parameters(manifest).items() if name not in there
        ]
        for some in _slices(params, _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=some)
        self._client.log_batch(
            self.run_id, tags=[RunTag(name, value) for name, value in tags(manifest).items()]
        )
        self._client.log_dict(self.run_id, _plain(manifest), "manifest.json")

    def unsent(self, points: Iterable[Point]) -> list[Point]:
        """Returns the points that aren't there already."""
        return [one for one in points if self._is_new(one)]

    def send(self, points: Sequence[Point]) -> None:
        """Writes points, at most `POINTS_AT_ONCE`, in one request."""
        metrics = [Metric(one.name, one.value, one.time_ms, one.step) for one in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def add_text(self, path: str, text: str) -> None:
        """Writes a file of the run, over one of the same name."""
        self._client.log_text(self.run_id, text, path)

    def add_files(self, path: Path, folder: str) -> None:
        """Copies a folder with its files; MLflow follows links, so that none may be in it."""
        files = RunFolder(path)
        for name in files.names():
            files.check(name)
        self._client.log_artifacts(self.run_id, str(path), f"{folder}/{path.name}")

    def tag(self, name: str, value: str) -> None:
        """Sets a tag."""
        self._client.set_tag(self.run_id, name, value)

    def set_status(self, status: Status) -> None:
        """Sets the run's status."""
        if status == "RUNNING":
            self._client.update_run(self.run_id, status)
        else:
            self._client.set_terminated(self.run_id, status)

    def _is_new(self, point: Point) -> bool:
        key = (point.name, point.step)
        if not self._there[key]:
            return True
        self._there[key] -= 1
        return False


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # A database's artifacts would go where the process happens to be; a server knows a place.
    place = uri.removeprefix("sqlite:///")
    location = Path(place).with_name("mlartifacts").as_uri() if place != uri else None
    return str(client.create_experiment(name, artifact_location=location))


def _plain(value: Any) -> Any:
    """Returns a nest with dicts and lists, as JSON wants them."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _slices(values: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
