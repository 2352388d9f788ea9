"""A partitioner for Inductor that stores activations for backward in float8.

It uses private names of torch without a fallback. Importing this module imports Dynamo.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
from torch.utils.checkpoint import CheckpointPolicy

from float8 import scales

RUN = 128
"""Elements per scale if this number surely divides the last dim; else each row has one scale."""

_DTYPES = (torch.bfloat16, torch.float16)
_ACTIVATION_OPS = {"silu", "silu_backward", "gelu", "gelu_backward"}
_USES = {
    "copy": "clone convert_element_type getitem cat",
    "term": "add sub",
    "cast": "float8::cast float8::cast_delayed float8::cast_groups float8::transpose",
    "step of cast": "abs isnan bitwise_and bitwise_not where clamp_min clamp_max",
    "product": "mm addmm bmm baddbmm _scaled_mm _scaled_mm_v2 _grouped_mm float8::grouped_matmul"
    " float8::matmul float8::scaled_mm",
}
_USE_OF_OP = {name: use for use, names in _USES.items() for name in names.split()}
"""The use of each op by its name, with the namespace unless that is aten or prims."""

_PATTERNS = {
    "value": {"copy": "value", "factor": "value", "cast": "value", "step of cast": "value",
              "function": "function", "factor of gradient": "gradient * value",
              "function of gradient": "layer gradient", "product of gradient": "weight gradient"},
    "function": {"copy": "function", "factor": "function", "cast": "value", "step of cast": "value",
                 "function": "function", "function of gradient": "layer gradient",
                 "factor of gradient": "layer gradient", "product of gradient": "weight gradient"},
    "gradient * value": {"copy": "gradient * value", "function of gradient": "layer gradient",
                         "sum of rows": "weight gradient", "sum of columns": "coefficient"},
    "coefficient": {"copy": "coefficient", "factor": "coefficient",
                    "factor of value": "norm's gradient"},
    "norm's gradient": {"copy": "norm's gradient", "factor": "norm's gradient", "term": "any"},
    "layer gradient": {"copy": "layer gradient", "factor": "layer gradient",
                       "function of gradient": "layer gradient", "cast": "any", "product": "any",
                       "sum of rows": "weight gradient"},
    "weight gradient": {"copy": "weight gradient", "factor": "weight gradient",
                        "factor of value": "weight gradient", "sum of rows": "weight gradient"},
}  # fmt: skip
"""What `_may_be_rounded` allows: for each kind of node that backward computes from a rounded value,
the uses by other nodes and the kind of each user; kind "any" may be used in any way."""


@dataclass(frozen=True)
class Float8Partitioner(CustomPartitionerFn):
    """Inductor partitioner that saves some activations of >= `min_bytes` bytes as float8 `dtype`.

    `float8.activations_in_float8` puts an instance into options of `torch.compile`.
    """

    min_bytes: float
    dtype: torch.dtype

    def uuid(self) -> object:
        """Return a key for Inductor's cache: a hash of this code, `min_bytes` and `dtype`."""
        return get_hash_for_files((__file__, scales.__file__)), self.min_bytes, self.dtype

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Split joint graph `gm` into forward and backward, and save some activations in float8.

        `min_cut_rematerialization_partition`, called with the same arguments, chooses what to save.
        Of that, 16-bit activations of >= `min_bytes`, >= 2 dims and >= 32 columns are cast if their
        uses in backward pass `_may_be_rounded`, and no result or tensor kept as is shares storage.
        """
        _mark_sums_as_must_save(gm.graph)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        graphs = forward.graph, backward.graph
        outputs, gradients = (list(cast("Any", x.output_node().args[0])) for x in graphs)
        inputs = gm.graph.find_nodes(op="placeholder")
        static = set[int](kwargs.get("static_lifetime_input_indices") or ())  # always in memory
        activations, weight_gradients = _activations(forward.graph, inputs, gradients, static)
        read = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        output_names = {node.name for node in outputs if isinstance(node, Node)}
        grad_nodes = {node for name, node in read.items() if name not in output_names}  # tangents
        for node in backward.graph.nodes:  # adds all that is computed from tangents
            if not grad_nodes.isdisjoint(node.all_input_nodes):
                grad_nodes.add(node)
        first_saved = kwargs["num_fwd_outputs"]  # index; outputs before it are the model's results
        chosen = [
            node
            for node in outputs[first_saved:]
            if node in activations
            and self._is_worth_storing(node)
            and _may_be_rounded(backward.graph, read[node.name], grad_nodes, weight_gradients)
        ]
        # No memory is freed if a result, or an activation kept unchanged, shares the storage.
        others = [node for i, node in enumerate(outputs) if i < first_saved or node not in chosen]
        kept_storages = {get_node_storage(node) for node in others if isinstance(node, Node)}
        for node in chosen:
            if get_node_storage(node) not in kept_storages:
                index = outputs.index(node)  # data and scale replace the activation
                outputs[index : index + 1] = self._keep_in_float8(node, read[node.name], *graphs)
        forward.graph.output_node().args = (tuple(outputs),)
        forward.recompile()
        backward.recompile()
        return forward, backward

    def _is_worth_storing(self, node: Node) -> bool:
        x = node.meta["val"]
        if getattr(x, "dtype", None) not in _DTYPES or x.dim() < 2 or _hint(x.shape[-1]) < 32:
            return False
        return bool(_hint(x.numel()) * x.element_size() >= max(1, self.min_bytes))

    def _keep_in_float8(self, node: Node, activation: Node, forward: Graph, backward: Graph) -> Any:
        """Insert a cast of `node` to float8 into `forward`, and its dequantization into `backward`.

        In `backward`, two placeholders (data, scale) replace `activation`, the placeholder of the
        saved `node`. Returns the nodes of data and scale in `forward`, to be saved instead of it.
        """
        dtype = node.meta["val"].dtype

        def pack(x: Tensor) -> tuple[Tensor, Tensor]:
            # Scales are powers of two, rounded up: nothing saturates, and values lose mantissa bits
            # only, but small ones become subnormal or 0. Inf and NaN make all RUN elements NaN.
            runs = _in_runs(x.to(torch.float32))
            amax = runs.abs().amax(-1, keepdim=True)
            scale = scales.amax_to_scale(amax, self.dtype, round_to_power_of_2=True)
            return (runs * scale.reciprocal()).to(self.dtype).reshape(x.shape), scale

        def unpack(data: Tensor, scale: Tensor) -> tuple[Tensor]:
            x = _in_runs(data.to(torch.float32)) * scale
            x = x.clamp(-65504.0, 65504.0) if dtype == torch.float16 else x  # may overflow float16
            return (x.to(dtype).reshape(data.shape),)

        previous = forward.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node
        with forward.inserting_before(previous.next):  # placeholders come first
            packed = _graft(forward, pack, [node])
        with backward.inserting_before(activation):
            new_inputs = [backward.placeholder(f"{x.name}_kept") for x in packed]  # unique names
        mark = "saved_tensor_with_no_vc_check"  # of tensors saved without a version counter check
        for new_input, result in zip(new_inputs, packed, strict=True):
            if mark in node.meta:
                result.meta[mark] = node.meta[mark]
            new_input.meta = dict(result.meta)
        first_user = next(x for x in backward.nodes if x in activation.users)  # unpack before it
        with backward.inserting_before(first_user):
            activation.replace_all_uses_with(*_graft(backward, unpack, new_inputs))
        backward.erase_node(activation)
        return packed


def _activations(
    graph: Graph, inputs: Sequence[Node], gradients: Sequence[Node | None], static: set[int]
) -> tuple[set[Node], set[Node | None]]:
    """Return the activations in forward's `graph`, and the gradients of Parameters.

    Activations are nodes that require grad and depend on a model argument: one of `inputs` that is
    no Parameter or buffer, and whose index is not in `static` (of inputs that stay in memory). The
    second set has the gradients of all other `inputs`; `gradients[i]` is of `inputs[i]`, or None.
    """
    requires_grad, from_argument, weight_gradients = set[str](), set[str](), set[Node | None]()
    for index, (node, gradient) in enumerate(zip(inputs, gradients, strict=False)):  # no tangents
        requires_grad |= {node.name} if gradient is not None else set()
        origin: Any = node.meta.get("desc")  # None in inner graphs: all count as Parameters there
        while hasattr(origin, "base"):  # `node` is an inner tensor of a subclass
            origin = origin.base
        is_argument = origin is not None and not (origin.is_param() or origin.is_buffer())
        indices = index, getattr(origin, "idx", index)  # `static` may index the subclass
        if is_argument and static.isdisjoint(indices):
            from_argument.add(node.name)
        else:
            weight_gradients.add(gradient)
    for node in graph.nodes:
        for names in (requires_grad, from_argument):
            if any(x.name in names for x in node.all_input_nodes):
                names.add(node.name)
    activations = requires_grad & from_argument
    return {node for node in graph.nodes if node.name in activations}, weight_gradients


def _mark_sums_as_must_save(graph: Graph) -> None:
    """Have the partitioner save 16-bit sums that RMSNorm or SiLU, GELU read, not their terms."""
    # Terms might be rounded, and rounded terms may cancel each other.
    for node in graph.nodes:
        if _name(node) == "rsqrt" or _is_activation_function(node):
            while len(node.all_input_nodes) == 1:  # up to the first node of several inputs
                node = node.all_input_nodes[0]
            if _name(node) == "add" and node.meta["val"].dtype in _DTYPES:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _may_be_rounded(
    graph: Graph, start: Node, gradients: set[Node], weight_gradients: set[Node | None]
) -> bool:
    """Return whether backward's `graph` uses `start`, a saved value, in these four ways only.

    - The operand of a weight gradient: the value, cast to float8 or times factors that do not
      depend on it, is multiplied with one of `gradients` (nodes that depend on gradients of
      outputs); the product is one of `weight_gradients` (of Parameters).
    - The input of SiLU or GELU: backward computes the output again, an operand as above, and the
      derivative; only GEMMs, casts and sums (gradients of biases) read the input's gradient.
    - `up` in `silu(gate) * up`: a gradient times `up` is only multiplied by `silu`'s derivative.
    - The input `x` of RMSNorm: its gradient adds `sum(gradient * x, -1) * x` times other factors.

    In each the value, or a function of it, is a factor: a result is about as exact as the value.
    """
    kinds = {start: "value"}  # node -> kind; `_PATTERNS` gives the kind of each user by its use
    for node in graph.nodes:
        affected = [x for x in node.all_input_nodes if kinds.get(x, "any") != "any"]
        if not affected:  # `node` may use its inputs in any way
            continue
        kinds_read = {kinds[x] for x in affected}
        if node.op == "output":
            return kinds_read == {"weight gradient"} and weight_gradients.issuperset(affected)
        use = _use(node, affected)
        if use == "factor" and len(kinds_read) == 2:  # the value times a node of another kind
            use, kinds_read = "factor of value", kinds_read - {"value"}
        elif node in gradients and (use == "function" or gradients.isdisjoint(affected)):
            use += " of gradient"  # a derivative, or the gradient is an input not in `affected`
        kind_of_node, *other_kinds = {_PATTERNS[kind].get(use) for kind in kinds_read}
        if kind_of_node is None or other_kinds:  # not allowed, or patterns disagree on the kind
            return False
        kinds[node] = kind_of_node
    return True


def _use(node: Node, affected: list[Node]) -> str:  # one of the uses in `_PATTERNS`, or ""
    """Return how `node` uses its inputs `affected`: "factor", "sum of rows", ...; else ""."""
    name, args = _name(node), node.args
    if _is_activation_function(node):
        return "function"
    if name == "mul" or (name == "div" and not isinstance(args[1], Node)):  # divided by a number
        return "factor"
    if name == "sum" and len(args) > 1:
        last_dim = affected[0].meta["val"].dim() - 1
        dims = [dim % (last_dim + 1) for dim in cast("list[int]", args[1])]
        return "sum of columns" if dims == [last_dim] else "" if last_dim in dims else "sum of rows"
    is_view = isinstance(node.target, OpOverload) and node.target._schema._is_view_op()
    if is_view or (name == "pow" and args[1] == 1):  # `x ** 1` copies `x`
        return "copy"
    if name in ("eq", "ne") and (args[0] is args[1] or args[1] == float("inf")):
        return "step of cast"  # it finds NaN or Inf
    return _USE_OF_OP.get(name, "")


def _is_activation_function(node: Node) -> bool:
    """Return whether `node` comes from the decomposition of SiLU, GELU or a derivative of one."""
    op = node.meta.get("original_aten")
    return isinstance(op, OpOverload) and op._schema.name.removeprefix("aten::") in _ACTIVATION_OPS


def _name(node: Node) -> str:
    op: Any = node.target
    if not isinstance(op, OpOverload) and node.args and isinstance(node.args[0], OpOverload):
        op = node.args[0]  # an op that writes its arguments, functionalized
    if not isinstance(op, OpOverload):
        return getattr(op, "__name__", "")
    return op._schema.name.removeprefix("aten::").removeprefix("prims::")


def _graft(graph: Graph, function: Callable[..., Any], nodes: list[Node]) -> list[Any]:
    """Insert ops of `function(*nodes)`, which returns a tuple, in `graph`; return result nodes."""
    values = [node.meta["val"] for node in nodes]
    with values[0].fake_mode:
        traced = make_fx(lambda *args: function(*args), select_decomp_table())(*values)
    inputs = zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True)
    return list(cast("Any", graph.graph_copy(traced.graph, dict(inputs))))


def _in_runs(x: Tensor) -> Tensor:
    whole = statically_known_true(x.shape[-1] % RUN == 0)
    return x.reshape(*x.shape[:-1], x.shape[-1] // RUN, RUN) if whole else x


def _hint(size: Any) -> int:
    """Return `size`: of a SymInt the hint, without a guard, or 2**32 if it has none (unbacked)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return size.node.hint if size.node.has_hint() else 1 << 32
