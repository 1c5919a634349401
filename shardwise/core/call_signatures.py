"""Whether a user's function can be called as it will be: by its signature in the module's file, without an import."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.module_files import defined


@dataclass(frozen=True)
class Call:
    """How a user's function is called.

    Attributes:
        values: names of the positional arguments.
        keywords: names of the keyword arguments; None where the data has them, and the function may require any.
        optional: keyword arguments that a function gets if it has them.
        methods: a class is called with nothing, and its methods of this prefix with the values.
    """

    values: Sequence[str] = ()
    keywords: Collection[str] | None = ()
    optional: Collection[str] = ()
    methods: str = ""

    @property
    def shown(self) -> str:
        names = [*self.values, *(("**fields",) if self.keywords is None else self.keywords)]
        return f"({', '.join(names)})"

    def fault(self, signature: Signature) -> str:
        """Why a function of this signature cannot be called so; "" if it can."""
        own = [p.name for p in signature.parameters.values() if p.kind is not Parameter.KEYWORD_ONLY]
        for number, name in enumerate(own[: len(self.values)]):
            if name in self.values and name != self.values[number]:
                return f"its argument {number + 1} is {name!r}"
        bind = signature.bind_partial if self.keywords is None else signature.bind
        keywords = {*(self.keywords or ()), *(name for name in self.optional if name in own)}
        try:
            bind(*self.values, **dict.fromkeys(keywords))
        except TypeError as error:
            return str(error)
        return ""


def require_callable(target: str, where: str, call: Call) -> None:
    """Raise RecipeError if the file of a module defines what it names so that it cannot be called.

    Args:
        where: the key of the recipe, for errors.
    """
    file, node = defined(target)
    for function, inner in () if node is None else _called(node, call):
        if fault := inner.fault(_signature(function.args)):
            bound = Call(inner.values[isinstance(node, ast.ClassDef) :], inner.keywords)
            raise _error(where, f"{file}:{function.lineno}: {fault}", function.name, bound)


def require_accepts(function: Callable[..., Any], where: str, call: Call) -> None:
    """The same for a function that is here; one whose signature Python does not know is left alone."""
    try:
        fault = call.fault(inspect.signature(function))
    except (TypeError, ValueError):
        return
    if fault:
        code = getattr(function, "__code__", None)
        location = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        raise _error(where, location + fault, getattr(function, "__name__", type(function).__name__), call)


def _error(where: str, why: str, name: str, call: Call) -> RecipeError:
    what = f"{name} has another signature than its call"
    return RecipeError(what, where=where, why=why, fix=f"it is called as {name}{call.shown}")


def _called(node: ast.FunctionDef | ast.ClassDef, call: Call) -> Iterator[tuple[ast.FunctionDef, Call]]:
    """The functions that are called, and how."""
    if isinstance(node, ast.FunctionDef):
        yield node, Call() if call.methods else call
    elif call.methods:
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and not inner.decorator_list:
                if inner.name.startswith(call.methods):
                    yield inner, Call(("self", *call.values))
                elif inner.name == "__init__":
                    yield inner, Call(("self",))


def _signature(arguments: ast.arguments) -> Signature:
    """The signature of a function in a file; defaults are only there or not."""
    kinds = (
        (arguments.posonlyargs, Parameter.POSITIONAL_ONLY),
        (arguments.args, Parameter.POSITIONAL_OR_KEYWORD),
    )
    positional = [(p, kind) for args, kind in kinds for p in args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(p.arg, kind, default=_default(n >= required)) for n, (p, kind) in enumerate(positional)
    ]
    parameters += [Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL)] if arguments.vararg else []
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [
        Parameter(p.arg, Parameter.KEYWORD_ONLY, default=_default(d is not None)) for p, d in pairs
    ]
    parameters += [Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)] if arguments.kwarg else []
    return Signature(parameters)


def _default(there: bool) -> object:
    return None if there else Parameter.empty
