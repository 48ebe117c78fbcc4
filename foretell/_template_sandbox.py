"""What chat templates run in: Jinja's sandbox, and a budget for all that they do there.

The sandbox keeps a template away from Python's insides, but not from filling the memory or from
running for ever. So whatever can copy, repeat or go through something is paid for here, before it
happens: operators, calls, filters, tests, comparisons, literals, each turn of a loop and each piece
of text. Of Jinja's filters and of the methods of Python's types, those are left out that no prompt
needs and that are hard to put a price on.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

from jinja2 import Environment, TemplateAssertionError, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_round, do_sum, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace, pass_environment
from jinja2.visitor import NodeTransformer

BUDGET = 1 << 27
"""What a rendering may cost. The unit is about a character that is copied."""
_STEP = 64  # an element, a turn of a loop, a call: about the bytes and nanoseconds that it takes
_NODE = 8  # a node of a template, run once
_GLANCE = 1 / 8  # of reading text: comparing it
_SORTING = 16  # times going through a value

_DEEPEST = 64  # lists in lists
_MAX_BITS = 1 << 14  # of whole numbers, beyond which arithmetic takes time
_MAX_WIDTH = 9999
_MAX_INDENT = 16


class Budget:
    """What one rendering has left. Use it with ``with``: it is then what the sandbox spends."""

    def __init__(self) -> None:
        self._left = float(BUDGET)

    def __enter__(self) -> Budget:
        self._token = _BUDGET.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _BUDGET.reset(self._token)

    def spend(self, cost: float) -> None:
        self._left -= cost
        if self._left < 0:
            raise TemplateError("the template does more than any prompt needs, perhaps without end")

    def read(self, value: Any, times: float = 1, depth: int = 0) -> None:
        """Pay for going through a value and all that is in it, its text so many ``times``."""
        if depth > _DEEPEST:
            raise TemplateError("the template nests lists too deeply")
        length = 0
        inside: Iterable[Any] = ()
        if isinstance(value, str):
            length = len(value)
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise TemplateError("the template computes with numbers that are too large")
        elif isinstance(value, range):
            length = len(value)
        elif isinstance(value, Namespace):
            # Where Jinja keeps them, and what `str` of a namespace shows.
            inside = (getattr(value, "_Namespace__attrs"),)  # noqa: B009
        elif isinstance(value, dict):
            inside = itertools.chain.from_iterable(value.items())
        elif isinstance(value, _HOLDERS):
            inside = cast(Iterable[Any], value)
        self.spend(_STEP * max(times, 1) + length * times)
        for item in inside:
            self.spend(_STEP * max(times, 1))
            self.read(item, times, depth + 1)

    def size(self, value: Any) -> None:
        """Pay for a value alone, not for what is in it."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(8 * len(value))
        else:
            self.spend(_STEP)

    def turns(self, values: Iterable[Any], cost: float = _STEP) -> Iterator[Any]:
        """The values, each of which is paid for when it is reached."""
        for value in values:
            self.spend(cost)
            yield value


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_HOLDERS = (list, tuple, set, frozenset, *_VIEWS)
_BUDGET: ContextVar[Budget] = ContextVar("_BUDGET")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, metered."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing runs while a template is compiled, when nothing is paid for
            finalize=_written,
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        filters = {name: call for name, call in self.filters.items() if name not in _LEFT_OUT}
        filters |= _FILTERS
        self.filters = {name: _metered_filter(name, call) for name, call in filters.items()}
        self.filters |= {call.__name__: call for call in (_each, _joined, _made, _cut, _compared)}
        self.filters[_run.__name__] = _run
        self.tests = {
            name: _metered_test(name, cast(Callable[..., Any], call))
            for name, call in self.tests.items()
        }

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> Any:
        return super()._generate(_Meter(self).visit(source), *args, **options)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return attr in methods and super().is_safe_attribute(obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        if operator == "%" and isinstance(left, str):
            return _formatted(left, right)
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str) and isinstance(other, int):
                    budget.spend(len(one) * max(other, 0))
                elif isinstance(one, list | tuple) and isinstance(other, int):
                    budget.read(one, max(other, 0))
        if operator == "+" and isinstance(left, str | list | tuple):
            budget.size(left)
            budget.size(right)
        if isinstance(left, int) and isinstance(right, int):
            budget.read(left)
            budget.read(right)
            bits = left.bit_length() * max(right, 1) if operator == "**" else 0
            if operator == "*":
                bits = left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateError("the template computes with numbers that are too large")
        budget.spend(_STEP)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        escape = getattr(text, "escape", None)  # only Jinja's marked-up strings have it
        formatter: Any = _EscapeFormatter(self, escape=escape) if escape else _Formatter(self)
        takes_mapping = value.__name__ == "format_map"

        def format_(*args: Any, **kwargs: Any) -> str:
            _BUDGET.get().spend(len(text) * _STEP)
            if takes_mapping:
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))

        return format_

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _BUDGET.get()
        budget.spend(4 * _STEP)
        for arg in (*args, *kwargs.values()):
            budget.size(arg)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext):  # a recursive loop goes on
            args = tuple(budget.turns(values) for values in args)
        elif isinstance(owner, str):
            args = _pay_for_method(budget, owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, list | tuple | LoopContext):  # compare what they are given
            budget.read((owner, args))
        result = super().call(__context, __obj, *args, **kwargs)
        budget.size(result)
        return result


def _pay_for_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Pay for a method of a string; returns its arguments, which may have been used up."""
    budget.spend(len(text))
    if name == "join" and args:
        args = (list(budget.turns(args[0])), *args[1:])
        budget.read(args[0])
        budget.spend(len(text) * len(args[0]))
    elif name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        budget.spend(_growth(text, args[0], args[1]))
    elif name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args else kwargs.get("sep")
        if isinstance(separator, str) and separator and name != "splitlines":
            budget.spend(_STEP * text.count(separator))
        else:
            budget.spend(_STEP // 2 * len(text))
    return args


def _growth(text: str, old: str, new: str) -> int:
    """At most how many characters replacing can write."""
    return (len(text) // max(len(old), 1) + 1) * len(new)


class _Formatter(SandboxedFormatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        _BUDGET.get().read(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = _BUDGET.get()
        budget.read(value)
        budget.spend(_widest(format_spec))
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


_TEXT = frozenset(
    "capitalize casefold count endswith find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isspace istitle isupper join lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper".split()
)
_METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (str, _TEXT),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    ((list, tuple, range), frozenset(("copy", "count", "grouper", "index", "list"))),
    ((int, float, complex, bytes, bytearray, set, frozenset, *_VIEWS), frozenset()),
)
"""What can be called of each type; whatever is not named here is not offered."""

_LEFT_OUT = frozenset(
    "batch center filesizeformat pprint slice striptags urlize wordwrap xmlattr".split()
)
_LOOKS = frozenset(  # at one element, or at one after another when they are asked for
    "attr count d default first items last length list map random reject rejectattr reverse "
    "select selectattr".split()
)
_COMPARE = frozenset("== != < <= > >= eq equalto ge greaterthan gt in le lessthan lt ne".split())
_SORTS = frozenset("dictsort groupby max min sort unique".split())


def _metered_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    times = 0 if name in _LOOKS else _SORTING if name in _SORTS else 1

    @wraps(call)
    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.spend(_STEP)
        if times:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            budget.read((args, kwargs), times)
        result = call(*args, **kwargs)
        if isinstance(result, Iterator):
            return budget.turns(result)
        budget.size(result)
        return result

    return metered


def _metered_test(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def metered(*args: Any) -> Any:
        budget = _BUDGET.get()
        if name in _COMPARE:
            budget.read(args, _GLANCE)
        for arg in args:
            budget.size(arg)
        return call(*args)

    return metered


# --- Filters and functions -----------------------------------------------------------


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    items, budget = list(value), _BUDGET.get()
    budget.read(items)
    budget.spend(len(items) * len(str(d)))
    return str(d).join(map(str, items))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _BUDGET.get().spend(_growth(str(s), str(old), str(new)))
    return str(s).replace(str(old), str(new), -1 if count is None else count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    length = width if isinstance(width, int) else len(width)
    _check_width(length)
    _BUDGET.get().spend((str(s).count("\n") + 1) * length)
    return do_indent(s, width, first, blank)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    return _formatted(str(value), kwargs or args)


def _formatted(text: str, values: Any) -> str:
    """``text % values``. Raises TemplateError for a width that is huge, or taken from a value."""
    if re.search(r"%[-#0 +.\d]*\*", text):
        raise TemplateError("the template takes the width of a text from a value")
    budget, fields = _BUDGET.get(), text.count("%")
    budget.read(values, fields + 1)
    budget.spend(len(text) + fields * _widest(text))
    formatted: str = text % values
    return formatted


def _widest(form: str) -> int:
    """The largest number in a format. Raises TemplateError for one that is no sensible width."""
    widest = max((int(number[:9]) for number in re.findall(r"\d+", form)), default=0)
    _check_width(widest)
    return widest


def _check_width(width: int) -> None:
    if width > _MAX_WIDTH:
        raise TemplateError(f"the template asks for a width of {width}")


def _list(value: Iterable[Any]) -> list[Any]:
    return list(_BUDGET.get().turns(value))


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 100:
        raise TemplateError(f"the template rounds to {precision} digits")
    return do_round(value, precision, method)


@pass_environment
def _sum(
    environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    if not isinstance(start, int | float):  # adding lists copies them again and again
        raise TemplateError("the template adds up what are no numbers")
    return do_sum(environment, iterable, attribute, start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    width = indent if isinstance(indent, int) else len(indent or "")
    width += sum(map(len, separators or ()))
    if width > _MAX_INDENT:
        raise TemplateError(f"the template indents JSON by {width}")
    _BUDGET.get().read(value, 1 + max(width, 0))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_FILTERS: dict[str, Callable[..., Any]] = {
    "format": _format,
    "indent": _indent,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": _to_json,
}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 1000 or re.search(r"%[-_0^#+]*\d{3}", form):
        raise TemplateError("the template asks for a date of a strange form")
    return datetime.now().strftime(form)


# --- What is woven into a template ---------------------------------------------------


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Pay for a piece of text. That it takes the context keeps Jinja from running it early."""
    _BUDGET.get().read(value)
    return value


def _each(values: Iterable[Any], cost: int) -> Iterator[Any]:
    return _BUDGET.get().turns(values, cost)


def _run(cost: int) -> None:
    _BUDGET.get().spend(cost)


def _joined(values: list[Any]) -> str:
    _BUDGET.get().read(values)
    return "".join(map(str, values))


def _made(value: Any) -> Any:
    _BUDGET.get().read(value)
    return value


def _cut(value: Any) -> Any:
    _BUDGET.get().size(value)
    return value


def _compared(value: Any) -> Any:
    _BUDGET.get().read(value, _GLANCE)
    return value


class _Meter(NodeTransformer):
    """Puts the filters above around everything in a template that Jinja lets nobody intercept."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def _through(self, call: Callable[..., Any], node: Any, *args: int) -> nodes.Filter:
        arguments = [nodes.Const(arg) for arg in args]
        return nodes.Filter(
            node,
            call.__name__,
            arguments,
            [],
            None,
            None,
            lineno=node.lineno,
            environment=self._environment,
        )

    def _cost(self, *parts: nodes.Node) -> int:
        return _NODE * sum(1 + sum(1 for _ in part.find_all(nodes.Node)) for part in parts)

    def _with_body(self, node: Any) -> Any:
        cost = nodes.Const(self._cost(*node.body), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._through(_run, cost), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = _with_body  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        cost = _STEP + (self._cost(node.test) if node.test else 0)
        self._with_body(node)
        node.iter = self._through(_each, node.iter, cost)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return self._through(_joined, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._through(_compared, node.expr)
        for operand in node.ops:
            operand.expr = self._through(_compared, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return self._through(_cut, node) if isinstance(node.arg, nodes.Slice) else node

    def _literal(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if stored else self._through(_made, node)

    visit_List = visit_Dict = visit_Tuple = _literal  # noqa: N815

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)  # plain text would not be paid for

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> NoReturn:  # noqa: N802
        raise TemplateAssertionError("prompts are not escaped: no 'autoescape'", node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)
