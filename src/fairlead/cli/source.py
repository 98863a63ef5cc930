"""The options that say where a command reads from: a cluster, or manifests; and with which
configuration.

In: what the user gave. Out: a `Source`. A command that takes `source_options` gets it as its first
argument."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fairlead.config import Config, load
from fairlead.plan.classes import CLASSES

if TYPE_CHECKING:
    from fairlead.kube.access import Access


class Source(msgspec.Struct, frozen=True):
    """`paths`: manifests, `-` for standard input; empty: a cluster."""

    paths: tuple[str, ...]
    config_path: Path | None
    kubeconfig: Path | None
    context: str | None

    @property
    def config(self) -> Config | None:
        """The configuration that the user named. Raises Refused."""
        return load(self.config_path, CLASSES) if self.config_path else None

    def access(self) -> "Access | None":
        """The way to the cluster; None: read manifests. Raises UsageError if both are named,
        Refused if there is no way."""
        if not self.paths:
            from fairlead.kube.auth import find_access

            return find_access(self.kubeconfig, self.context)
        if self.kubeconfig or self.context:
            raise click.UsageError(
                "-f names manifests, --kubeconfig and --context a cluster: give one or the other"
            )
        return None


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """`-f`, `--config`, `--kubeconfig`, `--context`."""

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

    file = click.Path(path_type=Path)
    for option in (
        click.option("--context", help="Context of the kubeconfig; without it, its current one."),
        click.option(
            "--kubeconfig", type=file, help="How to reach the cluster; without it as kubectl does."
        ),
        click.option(
            "--config",
            "config_path",
            type=file,
            help="fairlead.yaml; without it, the cluster's own (ConfigMap "
            "fairlead-system/fairlead).",
        ),
        click.option(
            "-f",
            "--filename",
            "paths",
            multiple=True,
            help="Manifest file, folder, or - for standard input; without it, the cluster of the "
            "kubeconfig.",
        ),
    ):
        with_source = option(with_source)
    return with_source
