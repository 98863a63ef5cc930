"""The options for the source of a command: a cluster or manifests, and the configuration.

In: the options of the user. Out: a `Source`, which a command with `source_options` gets as its
first argument."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from fairlead.config import Config, load
from fairlead.plan.classes import CLASSES

if TYPE_CHECKING:
    from fairlead.kube.access import Access

CommandT = TypeVar("CommandT", bound=Any)


class Source(msgspec.Struct, frozen=True):
    """The source of a command. `paths`: manifests, `-` for standard input; empty: a cluster."""

    paths: tuple[str, ...]
    config_path: Path | None
    kubeconfig: Path | None
    context: str | None

    @property
    def config(self) -> Config | None:
        """The configuration that the user specified. Raise Refused if it is invalid."""
        return load(self.config_path, CLASSES) if self.config_path else None

    def access(self) -> "Access | None":
        """Return how to reach the cluster; None: read manifests. Raise UsageError if both are
        specified, and Refused if the cluster cannot be determined."""
        if not self.paths:
            from fairlead.kube.auth import find_access

            return find_access(self.kubeconfig, self.context)
        if self.kubeconfig or self.context:
            raise click.UsageError(
                "-f selects manifests, --kubeconfig and --context select a cluster: give one or "
                "the other"
            )
        return None


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options `-f`, `--config`, `--kubeconfig`, `--context`."""

    @functools.wraps(command)
    def with_source(
        *,
        paths: tuple[str, ...],
        config_path: Path | None,
        kubeconfig: Path | None,
        context: str | None,
        **others: Any,
    ) -> None:
        command(Source(paths, config_path, kubeconfig, context), **others)

    manifests = click.option(
        "-f",
        "--filename",
        "paths",
        multiple=True,
        help="Manifest file, directory, or - for standard input. Default: the cluster of the "
        "kubeconfig.",
    )
    return manifests(config_option(cluster_options(with_source)))


def cluster_options(command: CommandT) -> CommandT:
    """Add the options `--kubeconfig` and `--context`."""
    context = click.option(
        "--context", help="Context of the kubeconfig. Default: the current context."
    )
    kubeconfig = click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path),
        help="Kubeconfig of the cluster. Default: as kubectl.",
    )
    decorated: CommandT = kubeconfig(context(command))
    return decorated


def config_option(command: CommandT) -> CommandT:
    """Add the option `--config`."""
    option = click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        help="fairlead.yaml. Default: ConfigMap fairlead-system/fairlead of the cluster.",
    )
    decorated: CommandT = option(command)
    return decorated
