# mypy: ignore-errors
# Everything here handles Numba's types and LLVM's values, which are not Python's.
"""From a function's syntax tree to LLVM IR, in one pass.

Numba analyses bytecode, infers types and lowers each statement: two thirds of the time that
compiling a kernel took. Kernels need little of it. A type is known as soon as a value is, since a
variable keeps the type of its first value. What is known when a kernel is compiled (a variant and
its fields, literals) is a Python value, computed here, and a branch that it rules out is never
emitted. Numba still says what an operator, an attribute or a call means.

Functions have arguments, ``if``, ``while``, ``for`` over ``range``, and tuples. They have no
exceptions, closures over variables, or references to count."""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
from functools import cache, reduce

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.fastmathpass import FastFloatBinOpVisitor, FastFloatCallVisitor
from numba.misc.special import typeof
from numba.np.numpy_support import from_dtype

from cpu_kernels.codegen.kept import source_of

I1 = ir.IntType(1)
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.USub: operator.neg,
    ast.Pow: operator.pow, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Invert: operator.invert,
}  # fmt: skip


class Value:
    """What is known at run time only: LLVM's value, and Numba's type of it."""

    __slots__ = ("llvm", "type")

    def __init__(self, kind, llvm):
        self.type, self.llvm = kind, llvm


class Part:
    """A function that entries and other parts call, translated once for each tuple of its
    arguments' types, and of those that are known."""

    def __init__(self, function):
        self.py_func, self.targetoptions = function, {}


class Emitter:
    """A function that emits instructions for its call. Parameters annotated with a type of
    Numba's are LLVM's values of that type; others are a ``Value``, or what is known."""

    def __init__(self, function):
        self._function = function
        kinds = inspect.get_annotations(function, eval_str=True)
        self._result = kinds.get("return")
        self._kinds = [kinds.get(name) for name in inspect.signature(function).parameters][1:]

    def emit(self, translation, builder, args):
        given = [
            x if kind is None else translation.cast(builder, x, kind)
            for x, kind in zip(args, self._kinds, strict=True)
        ]
        found = self._function(builder, *given)
        return found if self._result is None else Value(self._result, found)


@cache
def _definitions(path):
    """The functions of a file, by the line where they begin."""
    return {
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]): node
        for node in ast.walk(ast.parse(source_of(path)))
        if isinstance(node, ast.FunctionDef)
    }


@cache
def _parsed(function):
    """A function's definition, and the names that it assigns to more than once."""
    code = function.__code__
    definition = _definitions(code.co_filename)[code.co_firstlineno]
    counts = dict.fromkeys(code.co_varnames[: code.co_argcount], 1)
    for node in ast.walk(definition):
        name = node.target if isinstance(node, ast.AugAssign) else node
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
            counts[name.id] = counts.get(name.id, 0) + 1  # twice where it is changed
    return definition, {name for name, count in counts.items() if count > 1}


@cache
def _scope(function):
    """What a function's names mean that aren't its own."""
    found = inspect.getclosurevars(function)
    return {**vars(builtins), **function.__globals__, **found.nonlocals}


@cache
def _number_type(callee):
    """Numba's type where ``callee`` is a type of numbers, else None."""
    if callee in (int, float, bool):
        return typeof(callee(0))
    if isinstance(callee, type) and issubclass(callee, np.number):
        return from_dtype(np.dtype(callee))
    return None


class Translation:
    """One module of LLVM IR, and what it has of functions."""

    def __init__(self, typing, context, module):
        self.typing, self.context, self.module = typing, context, module
        module.translation = self  # for emitters that call parts
        self._functions, self._resolved = {}, {}

    def call(self, builder, function, args):
        """Call a function."""
        found = self.function(function, args)
        result = builder.call(found.llvm, [x.llvm for x in args if isinstance(x, Value)])
        return self.unpack(builder, found.type, result)

    def function(self, function, args):
        """A function for these arguments, translated once."""
        key = (function, *(x.type if isinstance(x, Value) else (type(x), x) for x in args))
        if key not in self._functions:
            self._functions[key] = _Function(self, function, args)
        return self._functions[key]

    def unpack(self, builder, kind, llvm):
        """A result: None, a value, or a tuple of values."""
        if kind is None or kind == types.void:
            return None
        if isinstance(kind, types.BaseTuple):
            parts = enumerate(kind)
            return tuple(Value(each, builder.extract_value(llvm, i)) for i, each in parts)
        return Value(kind, llvm)

    def value(self, builder, given):
        """A value, of one that is known where need be."""
        if isinstance(given, Value):
            return given
        if isinstance(given, tuple):
            parts = [self.value(builder, each) for each in given]
            kind = types.Tuple(tuple(part.type for part in parts))
            packed = self.context.make_tuple(builder, kind, [part.llvm for part in parts])
            return Value(kind, packed)
        kind = self.typing.resolve_value_type(given)
        if isinstance(given, (bool, int, float, np.number)):
            return Value(kind, self.context.get_constant(kind, given))
        return Value(kind, self.context.get_dummy_value())

    def cast(self, builder, given, kind):
        """LLVM's value of that type."""
        value = self.value(builder, given)
        if value.type == kind:
            return value.llvm
        return self.context.cast(builder, value.llvm, value.type, kind)

    def apply(self, builder, function, args):
        """What Numba does for an operator, a function or an intrinsic."""
        if isinstance(function, _Intrinsic):
            kinds = [x.type if isinstance(x, Value) else self._literal(x) for x in args]
            key = (function, *kinds)
            if key not in self._resolved:
                self._resolved[key] = function._defn(self.typing, *kinds)
            signature, emit = self._resolved[key]
            given = zip(args, signature.args, strict=True)
            values = [self._argument(builder, x, kind) for x, kind in given]
            result = emit(self.context, builder, signature, values)
            return self.unpack(builder, signature.return_type, result)
        args = [self.value(builder, x) for x in args]
        key = (function, *(x.type for x in args))
        if key not in self._resolved:
            callee = self.typing.resolve_value_type(function)
            signature = self.typing.resolve_function_type(callee, key[1:], {})
            if signature is None:
                raise TypeError(f"{function} takes no {key[1:]}")
            implementation = self.context.get_function(callee, signature)
            self.context.add_linking_libs(getattr(implementation, "libs", ()))
            self._resolved[key] = signature, implementation
        signature, implementation = self._resolved[key]
        given = zip(args, signature.args, strict=True)
        result = implementation(builder, [self.cast(builder, x, kind) for x, kind in given])
        return self.unpack(builder, signature.return_type, result)

    def _literal(self, known):
        return types.maybe_literal(known) or self.typing.resolve_value_type(known)

    def _argument(self, builder, given, kind):
        if isinstance(kind, types.Literal):
            kind = types.unliteral(kind)
        return self.cast(builder, given, kind)


class _Function(ast.NodeVisitor):
    """One function for these types and known values of its arguments.

    Attributes:
        llvm: LLVM's function. It takes what isn't known.
        type: of its result; None if it has none.
    """

    def __init__(self, translation, callee, args):
        function = callee.py_func
        self._all, self._scope = translation, _scope(function)
        definition, self._assigned_often = _parsed(function)
        self._names, self._variables, self._loops, self.type = {}, {}, [], None
        values = [x for x in args if isinstance(x, Value)]
        kinds = [translation.context.get_value_type(x.type) for x in values]
        module = translation.module
        self.llvm = ir.Function(
            module,
            ir.FunctionType(ir.VoidType(), kinds),
            module.get_unique_name(function.__qualname__),
        )
        self.llvm.linkage = "internal"
        self.llvm.attributes.add("nounwind")
        if any(isinstance(kind, ir.ArrayType) for kind in kinds):
            self.llvm.attributes.add("alwaysinline")  # tiles stay in registers
        self._builder = ir.IRBuilder(self.llvm.append_basic_block("entry"))
        given = iter(self.llvm.args)
        for name, arg in zip((x.arg for x in definition.args.args), args, strict=True):
            self._bind(name, Value(arg.type, next(given)) if isinstance(arg, Value) else arg)
        self._run(definition.body)
        if not self._builder.block.is_terminated:
            self._builder.ret_void() if self.type is None else self._builder.unreachable()
        if flags := callee.targetoptions.get("fastmath"):
            FastFloatBinOpVisitor(flags).visit_Function(self.llvm)
            FastFloatCallVisitor(flags).visit_Function(self.llvm)

    # --- statements

    def _run(self, statements):
        for statement in statements:
            if self._builder.block.is_terminated:
                return
            self.visit(statement)

    def generic_visit(self, node):
        self._refuse(node, True)

    def _refuse(self, node, is_refused):
        if is_refused:
            raise TypeError(f"{ast.unparse(node)} can't be translated")

    def visit_Expr(self, node):
        self.visit(node.value)

    def visit_Assign(self, node):
        value = self.visit(node.value)
        for target in node.targets:
            self._assign(target, value)

    def visit_AugAssign(self, node):
        operands = [self.visit(node.target), self.visit(node.value)]
        self._assign(node.target, self._operate(_OPERATORS[type(node.op)], operands))

    def _assign(self, target, value):
        builder = self._builder
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, ast.Tuple):
            for each, part in zip(target.elts, value, strict=True):
                self._assign(each, part)
        elif isinstance(target, ast.Subscript):
            base, index = self.visit(target.value), self.visit(target.slice)
            self._all.apply(builder, operator.setitem, [base, index, value])
        else:
            base = self.visit(target.value)
            signature = self._all.typing.resolve_setattr(base.type, target.attr, None)
            store = self._all.context.get_setattr(target.attr, signature)
            store(builder, [base.llvm, self._all.cast(builder, value, signature.args[1])])

    def _bind(self, name, value):
        """Give a name its value. One that is assigned to more than once is a variable."""
        if name not in self._assigned_often:
            self._names[name] = value
            return
        builder = self._builder
        if name not in self._variables:
            first = self._all.value(builder, value)
            with builder.goto_entry_block():
                memory = builder.alloca(first.llvm.type)
            self._variables[name] = first.type, memory
        kind, memory = self._variables[name]
        value = self._all.value(builder, value)
        if not self._fits(value.type, kind):
            raise TypeError(f"{name} of {self.llvm.name} is {kind} and becomes {value.type}")
        builder.store(self._all.cast(builder, value, kind), memory)

    def visit_If(self, node):
        test = self._test(node.test)
        if not isinstance(test, Value):
            self._run(node.body if test else node.orelse)
            return
        builder = self._builder
        then, other, end = (builder.append_basic_block() for _ in range(3))
        builder.cbranch(test.llvm, then, other)
        is_passed = False
        for block, body in ((then, node.body), (other, node.orelse)):
            builder.position_at_end(block)
            self._run(body)
            is_passed |= not builder.block.is_terminated
            self._go_to(end)
        builder.position_at_end(end)
        if not is_passed:
            builder.unreachable()

    def visit_While(self, node):
        self._refuse(node, node.orelse)
        head, end = (self._builder.append_basic_block() for _ in range(2))
        self._builder.branch(head)
        self._builder.position_at_end(head)
        test = self._test(node.test)
        self._refuse(node, test is False)
        if isinstance(test, Value):
            body = self._builder.append_basic_block()
            self._builder.cbranch(test.llvm, body, end)
            self._builder.position_at_end(body)
        self._run_body(node.body, head, end)

    def visit_For(self, node):
        builder = self._builder
        bounds = [self.visit(each) for each in node.iter.args]
        is_range = self.visit(node.iter.func) is range and not node.iter.keywords
        steps_up = len(bounds) < 3 or isinstance(bounds[2], Value) or bounds[2] > 0
        self._refuse(node, node.orelse or not (is_range and steps_up))
        bounds = [Value(types.int64, self._all.cast(builder, x, types.int64)) for x in bounds]
        if len(bounds) == 1:
            bounds.insert(0, self._all.value(builder, 0))
        step = bounds[2] if len(bounds) == 3 else self._all.value(builder, 1)
        with builder.goto_entry_block():
            counter = builder.alloca(step.llvm.type)
        builder.store(bounds[0].llvm, counter)
        head, body, following, end = (builder.append_basic_block() for _ in range(4))
        builder.branch(head)
        builder.position_at_end(head)
        number = builder.load(counter)
        builder.cbranch(builder.icmp_signed("<", number, bounds[1].llvm), body, end)
        builder.position_at_end(following)
        builder.store(builder.add(number, step.llvm, flags=("nsw",)), counter)
        builder.branch(head)
        builder.position_at_end(body)
        self._bind(node.target.id, Value(types.int64, number))
        self._run_body(node.body, following, end)
        self._names.pop(node.target.id, None)  # Python's is one less

    def _run_body(self, body, following, end):
        self._loops.append((following, end))
        self._run(body)
        self._loops.pop()
        self._go_to(following)
        self._builder.position_at_end(end)

    def visit_Break(self, node):
        self._builder.branch(self._loops[-1][1])

    def visit_Continue(self, node):
        self._builder.branch(self._loops[-1][0])

    def _go_to(self, block):
        if not self._builder.block.is_terminated:
            self._builder.branch(block)

    def visit_Return(self, node):
        given = None if node.value is None else self.visit(node.value)
        if given is None:
            self._builder.ret_void()
            return
        value = self._all.value(self._builder, given)
        if self.type is None:
            self.type = value.type
            self.llvm.ftype = ir.FunctionType(value.llvm.type, self.llvm.ftype.args)
            self.llvm.type = self.llvm.ftype.as_pointer()
            self.llvm.return_value.type = value.llvm.type
        if not self._fits(value.type, self.type):
            raise TypeError(f"{self.llvm.name} returns {self.type} and {value.type}")
        self._builder.ret(self._all.cast(self._builder, value, self.type))

    def _fits(self, kind, first):
        """Return True if values of a type become those of the first without loss."""
        is_known = isinstance(kind, types.Integer) and isinstance(first, types.Integer)
        return kind == first or (is_known and kind.bitwidth <= first.bitwidth)

    # --- expressions

    def visit_Constant(self, node):
        return node.value

    def visit_Name(self, node):
        if node.id in self._variables:
            kind, memory = self._variables[node.id]
            return Value(kind, self._builder.load(memory))
        return self._names[node.id] if node.id in self._names else self._scope[node.id]

    def visit_Tuple(self, node):
        return tuple(self.visit(each) for each in node.elts)

    def visit_Attribute(self, node):
        base = self.visit(node.value)
        if not isinstance(base, Value):
            return getattr(base, node.attr)
        kind = self._all.typing.resolve_getattr(base.type, node.attr)
        load = self._all.context.get_getattr(base.type, node.attr)
        found = load(self._all.context, self._builder, base.type, base.llvm, node.attr)
        return self._all.unpack(self._builder, kind, found)

    def visit_Subscript(self, node):
        base, index = self.visit(node.value), self.visit(node.slice)
        if not isinstance(base, Value):
            return base[index]
        return self._all.apply(self._builder, operator.getitem, [base, index])

    def visit_BinOp(self, node):
        operands = [self.visit(node.left), self.visit(node.right)]
        return self._operate(_OPERATORS[type(node.op)], operands)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            test = self._test(node.operand)
            if not isinstance(test, Value):
                return not test
            return Value(types.boolean, self._builder.not_(test.llvm))
        return self._operate(_OPERATORS[type(node.op)], [self.visit(node.operand)])

    def visit_Compare(self, node):
        (symbol,), (right,) = node.ops, node.comparators
        left, right = self.visit(node.left), self.visit(right)
        if isinstance(symbol, ast.In):
            tests = [self._operate(operator.eq, [left, each]) for each in right]
            return reduce(lambda a, b: self._operate(operator.or_, [a, b]), tests)
        return self._operate(_OPERATORS[type(symbol)], [left, right])

    def _operate(self, function, operands):
        if any(isinstance(x, Value) for x in operands):
            return self._all.apply(self._builder, function, operands)
        return function(*operands)

    def visit_Call(self, node):
        self._refuse(node, node.keywords)
        callee = self.visit(node.func)
        args = [self.visit(each) for each in node.args]
        if isinstance(callee, (Part, Dispatcher)):
            return self._all.call(self._builder, callee, args)
        if isinstance(callee, Emitter):
            return callee.emit(self._all, self._builder, args)
        if (kind := _number_type(callee)) is not None:
            value = self._all.value(self._builder, callee(*args) if _are_known(args) else args[0])
            return Value(kind, self._all.cast(self._builder, value, kind))
        if callee in (min, max, len, abs) and _are_known(args):
            return callee(*args)
        if callee in (min, max):
            return self._choose(operator.lt if callee is min else operator.gt, *args)
        return self._all.apply(self._builder, callee, args)

    def _choose(self, is_better, *args):
        """The least or the largest of two numbers, the first if one is NaN."""
        first, second = (self._all.value(self._builder, x) for x in args)
        kind = self._all.typing.unify_types(first.type, second.type)
        first, second = (
            Value(kind, self._all.cast(self._builder, x, kind)) for x in (first, second)
        )
        is_second = self._operate(is_better, [second, first])
        return Value(kind, self._builder.select(is_second.llvm, second.llvm, first.llvm))

    def visit_IfExp(self, node):
        test = self._test(node.test)
        if not isinstance(test, Value):
            return self.visit(node.body if test else node.orelse)
        builder = self._builder
        then, other, end = (builder.append_basic_block() for _ in range(3))
        builder.cbranch(test.llvm, then, other)
        ways = []
        for block, branch in ((then, node.body), (other, node.orelse)):
            builder.position_at_end(block)
            value = self._all.value(builder, self.visit(branch))
            ways.append((value, builder.block))
        kind = self._all.typing.unify_types(*(value.type for value, _ in ways))
        return Value(kind, self._meet(end, kind, ways))

    def visit_BoolOp(self, node):
        return self._test(node)

    def _test(self, node):
        """Whether an expression is true: a bool, or a value of one bit."""
        if isinstance(node, ast.BoolOp):
            return self._decide(isinstance(node.op, ast.Or), node.values)
        found = self.visit(node)
        if not isinstance(found, Value):
            return bool(found)
        bit = self._all.context.is_true(self._builder, found.type, found.llvm)
        return Value(types.boolean, bit)

    def _decide(self, is_or, nodes):
        """``or`` or ``and`` of expressions, each evaluated only if those before leave it open."""
        first, builder = self._test(nodes[0]), self._builder
        if len(nodes) == 1 or first is is_or:
            return first
        if not isinstance(first, Value):
            return self._decide(is_or, nodes[1:])
        following, end = builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(first.llvm, *((end, following) if is_or else (following, end)))
        ways = [(self._all.value(builder, is_or), builder.block)]
        builder.position_at_end(following)
        ways.append((self._all.value(builder, self._decide(is_or, nodes[1:])), builder.block))
        return Value(types.boolean, self._meet(end, types.boolean, ways))

    def _meet(self, end, kind, ways):
        """Continue at ``end`` with the value of the block that was left."""
        builder, incoming = self._builder, []
        for value, block in ways:
            if not block.is_terminated:
                builder.position_at_end(block)
                value = Value(kind, self._all.cast(builder, value, kind))
                block = builder.block
                builder.branch(end)
            incoming.append((value.llvm, block))
        builder.position_at_end(end)
        phi = builder.phi(incoming[0][0].type)
        for way in incoming:
            phi.add_incoming(*way)
        return phi


def _are_known(args):
    return not any(isinstance(x, Value) for x in args)
