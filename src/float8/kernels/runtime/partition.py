"""Activations that Inductor's graphs of forward keep for those of backward: in float8.

Names of torch here are private; there is no fallback. Importing this module imports Dynamo.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_utils import get_node_storage
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from float8 import scales

RUN = 128
"""Elements along the last dim that share a scale, if that dim is a multiple of it; else all do."""

_SUMS = {"sum", "mean", "amax", "var_mean"}
_ALIKE = {"add", "mul", "neg", "abs", "relu", "where", "clamp", "clamp_min", "clamp_max", "cat"}
_ALIKE |= {"clone", "convert_element_type", "constant_pad_nd", "getitem"}
_HARMLESS = {*_SUMS, *_ALIKE, "sigmoid", "tanh", "erf", "isnan", "bitwise_and", "bitwise_not"}
_HARMLESS |= {"float8::cast", "float8::cast_groups", "float8::amax", "float8::transpose"}
_OF_FEW = {"rsqrt", "sqrt", "maximum", "minimum", "bitwise_or"}
_COMPARISONS = {"eq", "ne", "le", "lt", "ge", "gt"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"}
_PRODUCTS |= {"float8::grouped_matmul", "float8::matmul", "convolution_backward"}
"""Ops by their names; those that are not of aten with their namespace."""


@dataclass(frozen=True)
class Float8Partitioner(CustomPartitionerFn):
    """Split a graph into forward and backward as Inductor does, then keep activations in float8.

    For Inductor's option `custom_partitioner_fn`; see `float8.activations_in_float8`. Equal ones
    share what was compiled.
    """

    min_bytes: float
    dtype: torch.dtype

    def uuid(self) -> object:
        """Return what the caches of compiled code tell partitioners by."""
        return get_hash_for_files((__file__, scales.__file__)), self.min_bytes, self.dtype

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of forward and backward."""
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        results: Any = (each.graph.output_node().args[0] for each in (forward, backward))
        outputs, gradients = map(list, results)
        inputs, static = gm.graph.find_nodes(op="placeholder"), set[int]()
        static.update(kwargs.get("static_lifetime_input_indices") or ())
        activations = _activations(forward.graph, inputs, gradients, static)
        taken = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        kept = {node.name for node in outputs if isinstance(node, Node)}
        of_gradients = {node for node in taken.values() if node.name not in kept}
        for node in backward.graph.nodes:
            if not of_gradients.isdisjoint(node.all_input_nodes):
                of_gradients.add(node)
        count = kwargs["num_fwd_outputs"]
        chosen = [
            node
            for node in outputs[count:]
            if node in activations
            and self._pays(node)
            and _may_be_rounded(backward.graph, taken[node.name], of_gradients)
        ]
        # Nothing is freed where an output shares the storage, or what stays as it is.
        others = [node for i, node in enumerate(outputs) if i < count or node not in chosen]
        stays = {get_node_storage(node) for node in others if isinstance(node, Node)}
        for node in [node for node in chosen if get_node_storage(node) not in stays]:
            packed = self._pack_in_forward(forward.graph, node)
            self._unpack_in_backward(backward.graph, taken[node.name], packed)
            at = outputs.index(node)
            outputs[at : at + 1] = packed
        forward.graph.output_node().args = (tuple(outputs),)
        for graph in (forward, backward):
            graph.recompile()
        return forward, backward

    def _pays(self, node: Node) -> bool:
        x = node.meta["val"]
        if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
            return False
        enough = x.dim() > 1 and _hint(x.shape[-1]) >= 32 and _hint(x.numel()) > 0
        return enough and _hint(x.numel()) * x.element_size() >= self.min_bytes

    def _pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Scales are rounded up, so that nothing saturates, to powers of two, so that values lose
        # nothing but bits of their mantissa. What is not finite makes its run NaN.
        runs = _in_runs(x.to(torch.float32))
        scale = scales.amax_to_scale(runs.abs().amax(-1, keepdim=True), self.dtype, True)
        return (runs * scale.reciprocal()).to(self.dtype).reshape(x.shape), scale

    def _pack_in_forward(self, graph: Graph, node: Node) -> list[Node]:
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_before((inputs[-1] if node in inputs else node).next):
            packed = _graft(graph, self._pack, [node])
        unchecked = "saved_tensor_with_no_vc_check"
        for each in packed:
            each.meta |= {unchecked: node.meta[unchecked]} if unchecked in node.meta else {}
        return packed

    def _unpack_in_backward(self, graph: Graph, node: Node, packed: list[Node]) -> None:
        dtype, first = node.meta["val"].dtype, next(n for n in graph.nodes if n in node.users)

        def unpack(data: Tensor, scale: Tensor) -> tuple[Tensor]:
            x, largest = _in_runs(data.to(torch.float32)) * scale, torch.finfo(dtype).max
            x = x.clamp(-largest, largest) if dtype == torch.float16 else x  # rounded to above
            return (x.to(dtype).reshape(data.shape),)

        with graph.inserting_before(node):
            inputs = [graph.placeholder(f"{each.name}_kept") for each in packed]  # of no other node
        for each, of in zip(inputs, packed, strict=True):
            each.meta = dict(of.meta)
        with graph.inserting_before(first):
            node.replace_all_uses_with(*_graft(graph, unpack, inputs))
        graph.erase_node(node)


def _activations(
    graph: Graph, inputs: Sequence[Node], gradients: Sequence[Node | None], static: set[int]
) -> set[Node]:
    """Find what requires grad, is made of more than Parameters and buffers, and no probability."""
    traits = {}
    for index, (node, gradient) in enumerate(zip(inputs, gradients, strict=False)):
        what: Any = node.meta.get("desc")  # of an inner graph there is none: nothing is known
        while hasattr(what, "base"):  # an attribute of a tensor subclass; static are the subclasses
            what = what.base
        known = what is not None and not (what.is_param() or what.is_buffer())
        given = known and static.isdisjoint((index, getattr(what, "idx", index)))
        traits[node.name] = gradient is not None, given, False
    for node in graph.nodes:
        if node.op == "call_function":
            of = [traits.get(each.name, (False, False, False)) for each in node.all_input_nodes]
            alike = _name(node) in {*_ALIKE, "div"} or _is_view(node)
            sigmoid = all(_adds_one(user) for user in node.users)
            exponents = _name(node) in ("exp", "exp2") and not sigmoid
            exponents |= alike and any(c for *_, c in of)
            traits[node.name] = any(a for a, *_ in of), any(b for _, b, _ in of), exponents
    return {node for node in graph.nodes if traits.get(node.name) == (True, True, False)}


def _may_be_rounded(graph: Graph, start: Node, of_gradients: set[Node]) -> bool:
    """Whether all that backward does with a node, until it meets a gradient, keeps errors small.

    They grow where numbers that are nearly equal are subtracted or compared, where it divides by
    single numbers, and in exponents, of which fused attention takes some, too. So what is not known
    to be harmless is refused. What is made of the node: "few" are sums and maxima, "square" what
    GELU takes exponents of, "divisor" the 1 + exp(-x) of sigmoids.
    """
    kinds = {start: "each"}
    for node in graph.nodes:
        given = {kinds[each] for each in node.all_input_nodes if each in kinds}
        if not given or node.op == "output":
            continue
        name, few, divisors = _name(node), given == {"few"}, {"few", "divisor"}
        second = node.args[1] if len(node.args) > 1 else None
        if name == "sub":  # of a mean, or of a constant
            known = few or any(_is_alike_along_rows(each) for each in node.args)
        elif name == "div":
            known = not isinstance(second, Node) or kinds.get(second, "few") in divisors
        elif name == "reciprocal":
            known = given <= divisors
        elif name == "exp":
            known = given == {"square"} or all(_adds_one(user) for user in node.users)
        elif name == "pow":
            known = few or second in (1, 2, 3)
        elif name in _COMPARISONS:
            known = few or not isinstance(second, Node) or second is node.args[0]
        elif name in _PRODUCTS:
            known = node in of_gradients
        else:
            known = name in _HARMLESS or _is_view(node) or (few and name in _OF_FEW)
        if not known:
            return False
        if node in of_gradients:
            continue
        squares = name == "mul" and node.args[0] is second
        if few or name in _SUMS:
            kinds[node] = "few"
        elif name == "add" and _adds_one(node) and _name(node.args[0]) == "exp":
            kinds[node] = "divisor"
        elif squares or (name in ("mul", "neg") and "square" in given) or name == "pow":
            kinds[node] = "square"
        else:
            kinds[node] = "each"
    return True


def _is_alike_along_rows(each: Any) -> bool:
    """Whether it is a number, or a tensor with one number for each row or for all."""
    if not isinstance(each, Node) or each.target is torch.ops.aten.full.default:
        return True
    sizes = each.meta["val"].shape[-1:]  # of a scalar there is none
    return all(statically_known_true(size == 1) is True for size in sizes)


def _adds_one(node: Node) -> bool:
    return _name(node) == "add" and node.args[1:] == (1,)


def _name(node: Node) -> str:
    op = node.target
    if not isinstance(op, OpOverload):
        return getattr(op, "__name__", "")
    return op._schema.name.removeprefix("aten::").removeprefix("prims::")


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema._is_view_op()


def _graft(graph: Graph, function: Callable[..., Any], nodes: list[Node]) -> list[Any]:
    """Insert what `function` does to the values of nodes; return the nodes of its results."""
    values = [node.meta["val"] for node in nodes]
    with values[0].fake_mode:
        traced = make_fx(lambda *args: function(*args), select_decomp_table())(*values)
    inputs = zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True)
    results: Any = graph.graph_copy(traced.graph, dict(inputs))
    return list(results)


def _in_runs(x: Tensor) -> Tensor:
    whole = statically_known_true(x.shape[-1] % RUN == 0)
    return x.reshape(*x.shape[:-1], x.shape[-1] // RUN, RUN) if whole else x


def _hint(size: Any) -> int:
    """Return the size at hand without a guard; of a count that data decide a large one."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return size.node.hint if size.node.has_hint() else 1 << 32
