"""`fairlead demo`: create a lab, measure four setups, show the results, delete the lab."""

from typing import TYPE_CHECKING

import click

from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, draw, output_option, show

if TYPE_CHECKING:
    from fairlead.lab.demo import Report


@click.command()
@click.option(
    "--connections",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Connections for measuring shares, for each setup.",
)
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(min=1),
    default=17.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each event is observed.",
)
@click.option("--name", default="demo", show_default=True, help="Name of the lab.")
@click.option(
    "--keep", is_flag=True, help="Keep the lab afterwards, and print commands to try in it."
)
@output_option
def demo(connections: int, watch_s: float, name: str, keep: bool, output: Format) -> None:
    """Compare Fairlead with three other setups, with real packets.

    Creates a lab of network namespaces (a client, a router, a gateway, four nodes), places five
    pods 3/1/1/0 and connects to them in four setups: policy Cluster; policy Local with a load
    balancer without health checks; the same with a health monitor; Fairlead. Counts which requests
    were answered, whether the pod saw the client's address, how fair the shares were, and what
    clients experienced while a pod moved and while a node was killed. Needs root; takes about a
    minute.

    A monitor with the usual intervals needs up to 15 seconds to detect a change, so a --watch below
    16 makes its results look better than they are."""
    from fairlead.lab.demo import Demo, Report
    from fairlead.lab.site import Site

    def show_progress(what: str) -> None:
        click.echo(f"demo: {what}", err=True)

    async def show_it() -> Report:
        site = Site.create(name)
        await site.up(lambda what: show_progress(f"lab: {what}"))
        try:
            demo_run = Demo(site, connections=connections, watch_s=watch_s, progress=show_progress)
            report = await demo_run.run()
        except BaseException:
            await site.down()
            raise
        if not keep:
            show_progress("deleting the lab")
            await site.down()
        return report

    report = run(show_it())
    show(report, output, lambda: _table(report))
    if keep:
        _print_next_steps(name)


def _table(report: "Report") -> None:
    rows = [
        (
            setup.setup,
            f"{setup.answered} of {setup.requests}",
            "yes" if setup.client_address_kept else "no",
            f"{setup.busiest_pod_over_fair:.2f}",
            *(
                f"{event.failed} / {event.broken} / {event.longest_gap_ms} ms"
                for event in (setup.pod_moved, setup.node_killed)
            ),
        )
        for setup in report.setups
    ]
    draw(
        ("SETUP", "ANSWERED", "CLIENT ADDRESS KEPT", "BUSIEST POD", "POD MOVED", "NODE KILLED"),
        rows,
    )
    click.echo("BUSIEST POD: its share of the requests, divided by an equal share.")
    click.echo(
        "POD MOVED, NODE KILLED: failed new connections / open connections that broke "
        "unnecessarily /"
    )
    click.echo("longest time that a client was without an answer.")


def _print_next_steps(name: str) -> None:
    from fairlead.invocation import called

    fairlead = called()
    click.echo(f"""
The lab is running. Try:
  export KUBECONFIG=$({fairlead} lab kubeconfig --name {name})
  kubectl get svc -o wide
  kubectl describe svc fairlead
  VIP=$(kubectl get svc fairlead -o jsonpath='{{.status.loadBalancer.ingress[0].ip}}')
  {fairlead} lab exec --name {name} client1 -- curl -s http://$VIP/
  {fairlead} lab exec --name {name} gw1 -- fairlead status
  kubectl delete pod fairlead-1
  {fairlead} lab down --name {name}""")
