"""Which fields of the config's blocks a source file reads, found by following types through its functions.

Knows parameters annotated as a block, attributes called `config`, assignments, loops over lists of blocks, and
functions that return a block. Reads source text only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridflow.config.hints import block_of, field_types
from hybridflow.config.schema import Config

Read = tuple[type, str]  # (class of the block, name of the field)


def blocks(cls: type = Config) -> Iterator[type]:
    """The config's class and those of all its blocks."""
    yield cls
    for hint in field_types(cls).values():
        if (block := block_of(hint)) is not None:
            yield from blocks(block)


def keys(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Read]]:
    """Every key that is no block, with the field that holds it."""
    for field, hint in field_types(cls).items():
        if (block := block_of(hint)) is None:
            yield f"{prefix}{field}", (cls, field)
        else:
            yield from keys(block, f"{prefix}{field}.")


class Reader:
    """Collects reads of several files, which may call each other's functions."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
        self.classes = {cls.__name__: cls for cls in blocks()}
        self.returned = {node.name: cls for node in self._functions() if (cls := self._annotated(node.returns))}

    def reads(self) -> set[Read]:
        """Every field that is read, and every field of a block that is read by `vars`."""
        found: set[Read] = set()
        for function in self._functions():
            names = self._names(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and (cls := self._type(node.value, names)) is not None:
                    found.add((cls, node.attr))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars":
                    cls = self._type(node.args[0], names)
                    found |= {(cls, field) for field in field_types(cls)} if cls else set()
        return found

    def _functions(self) -> Iterator[ast.FunctionDef]:
        for tree in self.trees:
            yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))

    def _names(self, function: ast.FunctionDef) -> dict[str, type]:
        """The variables of a function that are blocks."""
        arguments = [*function.args.args, *function.args.kwonlyargs]
        names = {arg.arg: cls for arg in arguments if (cls := self._annotated(arg.annotation))}
        for _ in range(2):  # a name may be given before the walk meets what it is made of
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    self._bind(node.targets[0], node.value, names)
                elif isinstance(node, (ast.For, ast.comprehension)):
                    self._bind(node.target, node.iter, names)
        return names

    def _bind(self, target: ast.expr, value: ast.expr, names: dict[str, type]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for inner, given in zip(target.elts, value.elts):
                self._bind(inner, given, names)
        elif isinstance(target, ast.Name) and (cls := self._type(value, names)) is not None:
            names[target.id] = cls

    def _type(self, node: ast.expr, names: dict[str, type]) -> type | None:
        """The block that an expression is, or is a list of."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Call):
            return self.returned.get(ast.unparse(node.func).rpartition(".")[2])
        if not isinstance(node, ast.Attribute):
            return None
        outer = self._type(node.value, names)
        if outer is None:
            return Config if node.attr == "config" else None
        hint = field_types(outer).get(node.attr)
        return None if hint is None else block_of(hint)

    def _annotated(self, annotation: ast.expr | None) -> type | None:
        if annotation is None:
            return None
        named = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and node.id in self.classes]
        return self.classes[named[0]] if len(named) == 1 else None
