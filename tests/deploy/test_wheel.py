"""The wheel that users install, in its own virtual environment, without the lab."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree. The eBPF objects of the tree are up to date, or are built for it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fairlead`, installed from the wheel. Its dependencies are those of this environment, which
    comes after the new one in the module search path."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    subprocess.run(
        [
            *(ROOT / "build" / "tools" / "bin" / "uv", "pip", "install", "--offline", "--no-deps"),
            *("--python", folder / "bin" / "python", wheel),
        ],
        check=True,
        capture_output=True,
    )
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # Python does not process .pth files in a folder that a .pth file names. So the .pth file by
    # which the tree is installed here has no effect.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "fairlead"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], cwd="/", capture_output=True, text=True, check=False
    )


def test_the_wheel_has_the_roles_and_no_lab(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fairlead/roles/gateway.py", "fairlead/objects/direct_tc.o"} <= set(names)
    left_out = ("fairlead/lab", "fairlead/probe", "fairlead/cli/lab", "fairlead/cli/demo")
    assert not [name for name in names if name.startswith((*left_out, "tests", "bench"))]


def test_help_names_the_commands_of_the_wheel(program: Path) -> None:
    done = run(program, "--help")
    assert done.returncode == 0, done.stderr
    _, _, commands = done.stdout.partition("Commands:")
    named = [line.split()[0] for line in commands.splitlines() if line[:3].strip()]
    others = ["ingress", "doctor", "probe", "octavia", "status"]
    assert named == ["plan", "migrate", "announce", *others, *ROLES]
    for command in named:
        assert run(program, command, "--help").returncode == 0


ROLES = ["controller", "gateway", "node"]


def test_plan_works_without_the_source_tree(program: Path) -> None:
    done = run(program, "plan", "-f", str(ROOT / "examples" / "pools"))
    assert done.returncode == 0, done.stderr
    assert "SERVICE" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("lab",), ("lab", "up", "--nodes", "2"), ("demo", "--help")], ids=" ".join
)
def test_the_error_about_a_command_that_the_wheel_lacks_tells_where_it_is(
    program: Path, arguments: tuple[str, ...]
) -> None:
    done = run(program, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"`fairlead {arguments[0]}` is not part of this installation" in done.stderr
    assert "source tree" in done.stderr
    assert "Traceback" not in done.stderr
