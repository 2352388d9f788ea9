"""What Inductor's graphs of forward keep for those of backward: activations, in float8.

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
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from float8.scales import amax_to_scale

RUN = 128
"""Elements along the last dim that share a scale, if that dim is a multiple of it; else all do."""

_NEAR = 2


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
        return get_hash_for_files((__file__,)), self.min_bytes, self.dtype

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of forward and backward."""
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        outputs, gradients = _results(forward.graph), _results(backward.graph)
        inputs, static = gm.graph.find_nodes(op="placeholder"), set[int]()
        static.update(kwargs.get("static_lifetime_input_indices") or ())
        activations = _activations(forward.graph, inputs, gradients, static)
        taken = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        count = kwargs["num_fwd_outputs"]
        none = dict.fromkeys(forward.graph.nodes, 0)
        made = _near_probabilities(forward.graph, none, _is_elementwise)
        again = _made_again(backward.graph, {node.name for node in outputs if node is not None})
        chosen = []
        for node in (node for node in outputs[count:] if node in activations and self._pays(node)):
            read = _near_probabilities(backward.graph, {taken[node.name]: made[node]}, again)
            chosen += [node] * (max(read.values()) < _NEAR)
        # Nothing is freed where an output shares the storage, or what stays as it is.
        stays = {
            _storage(node) for i, node in enumerate(outputs) if i < count or node not in chosen
        }
        for node in [node for node in chosen if _storage(node) not in stays]:
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
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dim() < 2:
            return False
        return _hint(x.shape[-1]) >= 32 and _hint(x.numel()) * x.element_size() >= self.min_bytes

    def _pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Scales are rounded up, so that nothing saturates, to powers of two, so that values lose
        # nothing but bits of their mantissa. What is not finite makes its run NaN.
        runs = _in_runs(x.to(torch.float32))
        scale = amax_to_scale(runs.abs().amax(-1, keepdim=True), self.dtype, True)
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
            return ((_in_runs(data.to(torch.float32)) * scale).to(dtype).reshape(data.shape),)

        with graph.inserting_before(node):
            inputs = [graph.placeholder(f"{each.name}_kept") for each in packed]  # of no other node
        for each, of in zip(inputs, packed, strict=True):
            each.meta = dict(of.meta)
        with graph.inserting_before(first):
            node.replace_all_uses_with(*_graft(graph, unpack, inputs))
        graph.erase_node(node)


def _results(graph: Graph) -> list[Any]:
    results: Any = graph.output_node().args[0]
    return list(results)


def _activations(
    graph: Graph, inputs: Sequence[Node], gradients: Sequence[Node | None], static: set[int]
) -> set[Node]:
    """Find what requires grad, and is made of more than static inputs: Parameters and buffers."""
    traits = {
        node.name: (gradient is not None, index not in static)
        for index, (node, gradient) in enumerate(zip(inputs, gradients, strict=False))
    }
    for node in graph.nodes:
        if node.op == "call_function":
            of = [traits.get(each.name, (False, False)) for each in node.all_input_nodes]
            traits[node.name] = any(a for a, _ in of), any(b for _, b in of)
    return {node for node in graph.nodes if traits.get(node.name) == (True, True)}


def _made_again(graph: Graph, kept: set[str]) -> Callable[[Node], bool]:
    """Tell which nodes of backward compute forward once more: no gradient goes into them."""
    of_gradients = {n for n in graph.find_nodes(op="placeholder") if n.name not in kept}
    for node in graph.nodes:
        if not of_gradients.isdisjoint(node.all_input_nodes):
            of_gradients.add(node)
    return lambda node: node not in of_gradients


def _near_probabilities(
    graph: Graph, near: dict[Node, int], passes: Callable[[Node], bool]
) -> dict[Node, int]:
    """Find what is made of nodes by ops that pass it on, and how near that is to probabilities.

    1: a maximum or a logarithm may have been taken off. 2: exponents of that, or what fused
    attention reads.
    """
    near = dict(near)
    for node in graph.nodes:
        of = [near[each] for each in node.all_input_nodes if each in near]
        name = str(node.target)
        if of and ("attention" in name or "attn" in name or ("exp." in name and max(of) > 0)):
            near[node] = _NEAR
        elif of and passes(node):
            near[node] = max(*of, "sub." in name)
    return near


def _is_elementwise(node: Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload):
        return False
    return (
        torch.Tag.pointwise in op.tags
        or op._schema._is_view_op()
        or op is torch.ops.aten.cat.default
    )


def _graft(graph: Graph, function: Callable[..., Any], nodes: list[Node]) -> list[Any]:
    """Insert what `function` does to the values of nodes; return the nodes of its results."""
    values = [node.meta["val"] for node in nodes]
    with values[0].fake_mode:
        traced = make_fx(lambda *args: function(*args), select_decomp_table())(*values)
    inputs = zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True)
    results: Any = graph.graph_copy(traced.graph, dict(inputs))
    return list(results)


def _storage(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        return None
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _in_runs(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, RUN) if x.shape[-1] % RUN == 0 else x


def _hint(size: Any) -> int:
    """Return the size at hand without a guard; of a count that data decide a large one."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return size.node.hint if size.node.has_hint() else 1 << 32
