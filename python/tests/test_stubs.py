"""The stubs say what the modules have: every public name, every parameter and its default."""

import ast
import inspect
import pathlib

import pytest

import ballast
from ballast import _native, aio, delta, dtensor, safetensors

FOLDER = pathlib.Path(ballast.__file__).parent


def stub_of(module):
    name = module.__name__.rpartition(".")[2]
    tree = ast.parse((FOLDER / f"{'__init__' if module is ballast else name}.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}


def parameters(node):
    arguments = node.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def check_function(where, node, found):
    signature = inspect.signature(found)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return
    expected = list(signature.parameters)
    stubbed = parameters(node)
    if expected and expected[0] in ("self", "cls") or stubbed[:1] in (["self"], ["cls"]):
        expected, stubbed = [name for name in expected if name not in ("self", "cls")], stubbed[1:]
    assert stubbed == expected, where
    defaulted = len(node.args.defaults) + sum(default is not None for default in node.args.kw_defaults)
    with_default = sum(parameter.default is not parameter.empty for parameter in signature.parameters.values())
    assert defaulted == with_default, where


@pytest.mark.parametrize("module", [ballast, aio, delta, dtensor, safetensors], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_stub_as_it_is(module):
    stub = stub_of(module)
    public = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name)) and name != "__version__"]
    assert set(public) <= set(stub), set(public) - set(stub)
    for name in public:
        found, node = getattr(module, name), stub[name]
        if not isinstance(node, ast.ClassDef):
            check_function(name, node, inspect.unwrap(found))
            continue
        described = {
            inner.name: inner for inner in node.body if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        fields = {inner.target.id for inner in node.body if isinstance(inner, ast.AnnAssign)}
        members = {inner.targets[0].id for inner in node.body if isinstance(inner, ast.Assign)}
        for attribute, value in vars(found).items():
            inherited = any(hasattr(base, attribute) for base in found.__bases__)
            if attribute.startswith("_") or inspect.ismodule(value) or (inherited and attribute not in described):
                continue
            assert attribute in described or attribute in fields or attribute in members, f"{name}.{attribute}"
            if inspect.isfunction(value):
                check_function(f"{name}.{attribute}", described[attribute], value)
        for attribute in described:
            assert hasattr(found, attribute), f"{name}.{attribute}"


def test_the_native_stub_names_what_there_is():
    stub = stub_of(_native)
    assert set(stub) == {name for name in dir(_native) if not name.startswith("_")}
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            described = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)} - {"__init__", "__array_interface__"}
            assert described == {member for member in vars(getattr(_native, name)) if not member.startswith("_")}, name


def test_the_package_says_that_it_is_typed():
    assert (FOLDER / "py.typed").is_file()
