"""The options for the source of a command: a cluster or manifests, and the configuration.

In: the options of the user. Out: a `Source`, which a command with `source_options` gets as its
first argument."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fairlead.cli.parameters import NamedFile
from fairlead.config import Config, load, parse
from fairlead.plan.classes import CLASSES

if TYPE_CHECKING:
    from fairlead.kube.access import Access
    from fairlead.kube.manifests import Document, LeftOut, Manifests


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

    file = NamedFile()
    for option in (
        click.option("--context", help="Context of the kubeconfig. Default: the current context."),
        click.option(
            "--kubeconfig", type=file, help="Kubeconfig of the cluster. Default: as kubectl."
        ),
        click.option(
            "--config",
            "config_path",
            type=file,
            help="fairlead.yaml. Default: ConfigMap fairlead-system/fairlead of the cluster, or "
            "ConfigMap fairlead among the manifests.",
        ),
        click.option(
            "-f",
            "--filename",
            "paths",
            multiple=True,
            help="Manifest file, directory, or - for standard input. Default: the cluster of the "
            "kubeconfig.",
        ),
    ):
        with_source = option(with_source)
    return with_source


def scan_source(source: Source) -> "tuple[Config | None, list[Document | LeftOut]]":
    """Return the documents of the manifests, and the configuration: the specified one, or else the
    one in a ConfigMap of the chart among them. Raise Refused if it is invalid."""
    from fairlead.kube.manifests import Document, configuration_of, scan

    config, scanned = source.config, list(scan(source.paths))
    for each in scanned if config is None else ():
        if isinstance(each, Document) and (text := configuration_of(each)):
            config = parse(text, f"in ConfigMap fairlead of {each.place}", CLASSES)
            break
    return config, scanned


def report_left_out(manifests: "Manifests") -> None:
    """Report on standard error which parts of the manifests have no effect."""
    for each in manifests.left_out:
        click.echo(f"{'left out' if each.is_error else 'note'}: {each}", err=True)
    for key, submission in manifests.submissions.items():
        for remark in submission.remarks:
            click.echo(f"note: {key}: {remark}", err=True)
