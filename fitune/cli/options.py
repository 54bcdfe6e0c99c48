"""Command-line options made from the recipe's fields: names, types and help are declared once, in `recipe.py`."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from fitune.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

# Field names whose help reads better with another word than the type's name.
_METAVARS = {"data": "FILE", "eval_data": "FILE", "gpu": "NAME", "devices": "DEVICE", "out": "DIR"}


class SettingOption(click.Option):
    """An option that sets a recipe's field; `group` is its heading in the help."""

    def __init__(self, *args: Any, group: str = "", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


class SettingsCommand(click.Command):
    """A command whose help lists the recipe's settings under their headings, after its own options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own, groups = [], {}  # type: ignore[var-annotated]
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):  # the text above says what MODEL is
                continue
            if isinstance(param, SettingOption):
                groups.setdefault(param.group, []).append(record)
            else:
                own.append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)


def settings_options(leave_out: Sequence[str] = ()) -> Callable[[F], F]:
    """A decorator that adds an option for every recipe field but `model` and those of `leave_out`.

    Every option's value is None when it was not given; the command passes the others to `recipe.build`, which
    checks them, so that a recipe file and the command line complain alike.
    """

    def decorate(function: F) -> F:
        for name, info in reversed(Recipe.model_fields.items()):
            if name != "model" and name not in leave_out:
                function = _option(name, info)(function)
        return function

    return decorate


def option_name(field: str) -> str:
    """`lora_r` as `--lora-r`."""
    return "--" + field.replace("_", "-")


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that were on the command line."""
    return {name: value for name, value in values.items() if value is not None}


def _option(name: str, info: FieldInfo) -> Callable[[F], F]:
    flag = option_name(name)
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    common: dict[str, Any] = {
        "cls": SettingOption, "group": str(extra.get("group", "Settings")), "default": None, "help": help_text(info),
    }  # fmt: skip
    if bool in _members(info.annotation):
        return click.option(f"{flag}/--no-{flag[2:]}", name, **common)
    return click.option(flag, name, metavar=_METAVARS.get(name) or metavar(info.annotation), **common)


def help_text(info: FieldInfo) -> str:
    """The field's description with its default, when it has one that says something."""
    text = info.description or ""
    default = info.default
    if default is None or default == [] or default == "":
        return text
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    return f"{text}  [default: {shown}]"


def metavar(annotation: Any) -> str:
    """What stands after the option in the help: `N`, `X`, `TEXT` or the words it takes."""
    parts: list[str] = []
    for member in _members(annotation):
        origin = get_origin(member)
        if origin is Literal:
            parts += [str(choice) for choice in get_args(member)]
        elif origin is dict:
            parts.append("K=V,...")
        elif origin is list:
            words = metavar(get_args(member)[0])
            parts.append("NAME,..." if words == "TEXT" else f"{words.replace('|', ',')}")
        else:
            parts.append({int: "N", float: "X", str: "TEXT"}.get(member, "TEXT"))
    return "|".join(dict.fromkeys(parts))


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union without None, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return [annotation]
