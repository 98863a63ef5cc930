"""The command line: one thin module per command."""

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairlead")
def main() -> None:
    """Kubernetes Services of type LoadBalancer with externalTrafficPolicy Local that fully work."""
