"""Documents say what the code does: commands parse, recipes validate, tables are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

from fitune import recipe as recipes
from fitune.cli.api import make_recipe
from fitune.cli.main import COMMANDS, cli
from fitune.cli.options import given, option_name
from tests.house.source import FLOORS, PACKAGE, ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def code_blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"```(\w*)\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def shell_lines(path: Path) -> list[str]:
    return [
        line.strip()
        for language, text in code_blocks(path)
        if language in ("bash", "powershell")
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def fitune_commands(path: Path) -> list[list[str]]:
    """Every command line of fitune: in shell blocks, in backquotes, and in the comments of recipes."""
    text = path.read_text(encoding="utf-8")
    found = [line for line in shell_lines(path) if re.match(r"(\S*[/\\])?fitune ", line)]
    found += re.findall(r"`(fitune [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    if path.suffix == ".yaml":
        found += [line.lstrip("# ") for line in text.splitlines() if re.match(r"#\s+fitune [a-z]+ ", line)]
    return [shlex.split(line)[1:] for line in found]


ALL_COMMANDS = [(path, arguments) for path in [*PAGES, *EXAMPLES] for arguments in fitune_commands(path)]


def test_there_are_commands_to_check():
    used = {arguments[0] for _, arguments in ALL_COMMANDS}
    assert set(COMMANDS) <= used
    assert len(ALL_COMMANDS) > 30


@pytest.mark.parametrize(
    ("path", "arguments"), ALL_COMMANDS, ids=[f"{path.name}: {' '.join(args)}" for path, args in ALL_COMMANDS]
)
def test_documented_command_parses(path: Path, arguments: list[str]):
    """Parsed by the real command, its settings validated by the real recipe; nothing is run."""
    if "--help" in arguments or arguments[0] == "--json":
        return
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None, f"there is no command {arguments[0]}"
    params = command.make_context(arguments[0], arguments[1:]).params
    settings = given({key: value for key, value in params.items() if key in recipes.Recipe.model_fields})
    model = settings.pop("model", None)
    if model is not None:
        in_repository = ROOT / model if str(model).endswith(".yaml") else model
        make_recipe(in_repository, settings)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    used = {line.split()[1] for path in PAGES for line in shell_lines(path) if line.startswith("make ")}
    assert {"demo", "test"} <= used <= targets


def test_ci_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text().splitlines()
    assert "make test" in shell_lines(ROOT / "README.md")


def test_both_readmes_have_the_same_code():
    english, chinese = code_blocks(ROOT / "README.md"), code_blocks(ROOT / "README.zh-CN.md")
    assert english == chinese


def test_both_readmes_have_the_same_sections_and_links():
    def shape(path: Path) -> tuple[list[str], set[str]]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        levels = re.findall(r"^(#+) ", text, flags=re.MULTILINE)
        return levels, {link for link in links(path) if not link.startswith("README")}

    assert shape(ROOT / "README.md") == shape(ROOT / "README.zh-CN.md")


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    missing = [link for link in links(path) if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_every_page_is_linked_from_the_index():
    linked = set(links(ROOT / "docs" / "index.md"))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - linked == {"index.md"}


def test_map_of_the_house_is_complete():
    """Every folder and file of the package stands in docs/index.md, on the floor that the tests enforce."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    table = {}
    for floor, where in re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE):
        for name in re.findall(r"`([\w.]+)/?`", where):
            table[name.removesuffix(".py")] = int(floor)
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert table.keys() == rooms - {"__init__", "__main__"}
    assert table == {name: FLOORS[name] for name in table}


def test_written_pages_are_current(capsys):
    assert write_docs().main(["--check"]) == 0, capsys.readouterr().out


def test_recipe_page_has_every_option_of_the_help():
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    command = cli.get_command(click.Context(cli), "train")
    assert command is not None
    options = {param.opts[0] for param in command.params if isinstance(param, click.Option)}
    assert options - set(re.findall(r"`(--[a-z-]+)", page)) == set()
    documented = set(re.findall(r"^\| `\w+` \| `(--[a-z-]+)`", page, flags=re.MULTILINE))
    assert documented == {option_name(name) for name in recipes.Recipe.model_fields if name != "model"}


def test_plan_page_has_every_key_of_the_json():
    from fitune.memory.phases import NAMES
    from fitune.memory.replay import Peaks
    from fitune.planner.result import PlanResult, predicted_dict

    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`(\w+)`", page))
    assert set(PlanResult.__dataclass_fields__) <= keys
    peaks = Peaks(**dict.fromkeys(Peaks.__dataclass_fields__, 1))
    predicted = predicted_dict(peaks, workspace_bytes=0)
    assert {*NAMES, *predicted, *predicted["phases"]["step"]} <= keys


def test_what_several_gpus_have_not_run_is_listed():
    """Every way of sharing a job is in the list until a record of it is there; then the page has to be written anew."""
    section = (
        (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8").partition("## Not run on several real GPUs")[2]
    )
    ways = set(get_args(recipes.Recipe.model_fields["parallel"].annotation)) - {"auto", "none"}
    assert len(ways) >= 8 and ways <= set(re.findall(r"`(\w+)`", section))
    file = ROOT / "benchmarks" / "results" / "multi_gpu" / "records.json"
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    measured = [record["name"] for record in records if record.get("measured")]
    assert ("Nothing on this page has a record" in section) == (not measured), measured


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_a_recipe(path: Path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe = make_recipe(path, {})
    assert recipe.model == values["model"]
    assert set(values) <= set(recipes.Recipe.model_fields)


def test_qlora_example_says_what_it_promises():
    recipe = make_recipe(ROOT / "examples" / "qlora-7b-10gb.yaml", {})
    assert (recipe.lora_r, recipe.lora_alpha, recipe.lora_dropout, recipe.lora_bias) == (8, 16, 0.05, "none")
    assert recipe.lora_targets == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (recipe.base_format, recipe.double_quant, recipe.precision) == ("nf4", True, "bf16")
    assert (recipe.micro_batch, recipe.batch, recipe.vram) == (1, 4, 10)


def write_docs():
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts" / "write_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
