"""`trackers` of job.yaml: which libraries are told the numbers of a run besides TensorBoard, and
under which of their own names. Where they store them, and with which rights, their own environment
variables say."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from os import environ
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from elastic.config.numbers.metrics_port import MetricsPort
from elastic.config.strict_model import Strict
from elastic.errors import SpecError

TEXT_MOST = 500
Text = Annotated[str, Field(min_length=1, max_length=TEXT_MOST)]


class WandbKeys(Strict):
    """Weights & Biases. `project`: default the job's name."""

    project: Text | None = None
    entity: Text | None = None
    group: Text | None = None
    tags: list[Text] = []


class MlflowKeys(Strict):
    """MLflow. `experiment`: default the job's name; `tracking_uri`: default MLFLOW_TRACKING_URI."""

    experiment: Text | None = None
    tracking_uri: Text | None = None


class TrackioKeys(Strict):
    """Trackio. `project`: default the job's name; `space_id`: a Space of Hugging Face."""

    project: Text | None = None
    space_id: Text | None = None


class TrackersSpec(Strict):
    """None = it is not told."""

    wandb: WandbKeys | None = None
    mlflow: MlflowKeys | None = None
    trackio: TrackioKeys | None = None

    @model_serializer(mode="wrap")
    def _chosen_alone(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As plain data a library that is not named is not there."""
        return {name: keys for name, keys in plain(self).items() if keys is not None}

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Library -> its settings."""
        found = self.model_dump(exclude_none=True)
        return {name: dict(keys) for name, keys in found.items()}


def _by_name(value: Any) -> Any:
    """A name or a list of names is that library with its defaults."""
    if value is None:
        return {}
    names = [value] if isinstance(value, str) else value
    if isinstance(names, Mapping):
        return {name: {} if keys is None else keys for name, keys in names.items()}
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return dict.fromkeys(names, {})
    return value


def _port(value: Any) -> Any:
    if value is not None:
        try:
            MetricsPort.of(value)
        except SpecError as error:
            raise ValueError(str(error)) from None
    return value


TrackersKey = Annotated[TrackersSpec, BeforeValidator(_by_name)]
PortKey = Annotated[int | str | None, BeforeValidator(_port)]
# whose keys may stand under a key of job.yaml
OWNERS: Mapping[str, type[BaseModel]] = {
    "trackers": TrackersSpec, "wandb": WandbKeys, "mlflow": MlflowKeys, "trackio": TrackioKeys,
}  # fmt: skip


def check_installed(trackers: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Raises SpecError for a library that is not here, or cannot store where it would."""
    for name, keys in trackers.items():
        if find_spec(name) is None:
            raise SpecError(
                f"{where}: trackers: {name} is not installed where the driver runs; "
                f'pip install "elastic-ray[{name}]"'
            )
        uri = keys.get("tracking_uri") or environ.get("MLFLOW_TRACKING_URI", "")
        database = not uri or uri.partition(":")[0] in ("sqlite", "mysql", "postgresql", "mssql")
        if name == "mlflow" and database and find_spec("sqlalchemy") is None:
            kind = uri.partition(":")[0]
            given = f"'{kind}:' needs" if uri else "without an address MLflow needs"
            raise SpecError(
                f"{where}: trackers: mlflow: {given} its database, which mlflow-skinny has not; "
                "set MLFLOW_TRACKING_URI (https://SERVER, or file:FOLDER), or pip install mlflow"
            )
