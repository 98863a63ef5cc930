"""The text of a plan for SONiC, whose routing stack is FRR. Pure."""

from fairlead.routers import frr
from fairlead.routers.values import Reach

HEADER = """\
! SONiC: enter this in `docker exec -it bgp vtysh`, after `configure terminal`. Then `end`, and
! `write memory`: it distributes the commands to the files of the daemons (bgpd, staticd, bfdd).
! They stay only in the routing mode `split`, in which FRR has its own files. In config_db.json:
!   "DEVICE_METADATA": {"localhost": {"docker_routing_config_mode": "split"}}
"""


def render(reach: Reach) -> str:
    """Return the commands of FRR, with the mode of SONiC in which they stay."""
    return HEADER + frr.render(reach)
