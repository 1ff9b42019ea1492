"""The versions that are supported: data, read from where pip reads them too."""

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from tepo_nemo.config.presets import shipped_folder

PYTHONS = {"login": ((3, 10), (3, 13)), "cpu": ((3, 11), (3, 11)), "container": ((3, 10), (3, 12))}
"""First and last Python of each stack; the light layers are tested on 3.11 and 3.12."""
FILES = {"cpu": "cpu.txt", "container": "nemo_25_02.txt"}
"""The file in requirements/ that lists the packages of a stack."""


def supported(stack: str) -> list[Requirement]:
    """What the stack should have: its file in requirements/, without the packages of the tests."""
    if stack not in FILES:
        return []
    return parse((shipped_folder("requirements") / FILES[stack]).read_text(encoding="utf-8"))


def light() -> list[Requirement] | None:
    """What tepo_nemo itself was installed with (setup.py); None where it is no installed package."""
    try:
        lines = requires("tepo-nemo")
    except PackageNotFoundError:
        return None
    wanted = map(Requirement, lines or ())
    return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]


def parse(text: str) -> list[Requirement]:
    """The requirements of a file of pip's, up to the section `# Tests`."""
    lines = (line.split("#")[0].strip() for line in text.split("\n# Tests\n")[0].splitlines())
    return [Requirement(line) for line in lines if line]
