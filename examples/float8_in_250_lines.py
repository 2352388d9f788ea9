"""Float8 training on one page: plain torch, nothing of the library, to be read top to bottom.

A linear layer is three matrix multiplies (GEMMs), and these are most of the work of a large model.
GPUs multiply 8-bit numbers about twice as fast as 16-bit ones: on an H200 the GEMMs of four blocks
of Llama-3-8B take 31.1 ms of a step instead of 59.1 ms (docs/performance.md). So each GEMM here
gets its operands in float8. Weights, gradients and the optimizer stay as they are.

On a CPU a layer here computes what `Float8Linear` of the library does, bit by bit:
tests/test_examples.py compares the two. The table at the end says what the library adds.

Run it with `python examples/float8_in_250_lines.py`: on a CPU, or on an NVIDIA GPU with float8
tensor cores, as H100 and H200 have.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# ---------------------------------------------------------------- 1. The two formats
#
# Each number has a sign and seven more bits. The formats divide these seven differently:
#
#             exponent  mantissa  largest  smallest above 0  rounding is off by at most
#   e4m3      4 bits    3 bits    448      2**-9             1/16 of the number
#   e5m2      5 bits    2 bits    57344    2**-16            1/8 of the number
#   bfloat16  8 bits    7 bits    3.4e38   9.2e-41           1/256 of the number (for comparison)
#
# (Near zero the steps have one fixed size, so the relative error is larger.)
#
# Inputs and weights get e4m3: their values differ less in size, so the finer mantissa counts.
# Gradients get e5m2: their values differ much in size, and with the wider range fewer become zero.
# (The library can have a scale for each row, or block. e4m3 is wide enough for gradients then.)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


# ---------------------------------------------------------------- 2. From a tensor to its scale
#
# The gradients of a model may all be near 1e-7. Cast to e5m2 without a scale, all would become
# zero. So a tensor is divided by a number before it is rounded: its scale. Here one scale is for
# the whole tensor ("tensorwise"), and comes from the tensor at hand ("dynamic"). It maps the
# largest magnitude in the tensor, its amax, to the largest number of the format:
#
#   data = round(x / scale)        x is about data * scale


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of a tensor of any shape for a float8 format: one float32 number."""
    amax = x.abs().amax().float()
    # A tensor of zeros has an amax of 0, and nothing can be divided by a scale of 0. So 2**-100 is
    # the least: then neither the scale nor 1 / scale leaves the range of float32.
    amax = amax.clamp(min=2.0**-100)
    # In float64, then rounded once: that is the float32 quotient, correctly rounded, on each
    # device. In float32 a GPU may multiply by 1 / 448 instead, and be off by the last bit.
    return (amax.double() / LARGEST[dtype]).float()


# ---------------------------------------------------------------- 3. The cast


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x / scale` to the nearest float8 numbers, ties to even; any shape."""
    # One division for the tensor, one multiplication for each element: faster than to divide each.
    inverse = (1.0 / scale.double()).float()
    # In float32, also for `x` in bfloat16: else the product would be rounded twice.
    scaled = x.float() * inverse
    # The cast saturates: what exceeds the largest number becomes it. Here a value exceeds it by a
    # rounding error at most. With delayed scaling, real values can exceed it.
    #
    # Inf and NaN must stay visible. A NaN stays NaN through all of this. An Inf makes the scale
    # Inf, and 1 / scale zero: the Inf becomes 0 * Inf = NaN, all others become 0. The GEMM
    # multiplies its sums by the scale, so that these become NaN, too.
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


# ---------------------------------------------------------------- 4. The three GEMMs
#
# The layer computes `output = x @ w.T`. M is the number of tokens: all dims of the input but the
# last one, flattened. K is `in_features`, N is `out_features`.
#
#   input  x  [M, K]        weight  w  [N, K]        grad_output  g  [M, N]
#
#   output       [M, N]  =  x   [M, K]  @  w.T [K, N]      sums over K
#   grad_input   [M, K]  =  g   [M, N]  @  w   [N, K]      sums over N
#   grad_weight  [N, K]  =  g.T [N, M]  @  x   [M, K]      sums over M
#
# Layout: the float8 tensor cores of Hopper (H100, H200) read operands in one way only. Both must be
# contiguous along the dim that is summed over. (16-bit operands may lie the other way, too.) So a
# GEMM is written as `a @ b.T`, where `a` and `b` are contiguous along their last dim, that one:
#
#                a               b
#   output       x   [M, K]      w   [N, K]
#   grad_input   g   [M, N]      w.T [K, N]   a transposed copy
#   grad_weight  g.T [N, M]      x.T [K, M]   two transposed copies
#
# Each tensor is needed twice: as it is, and transposed. Under one scale for the whole tensor the
# copy has the same bytes in another order.
#
# Sizes: `torch._scaled_mm` on a GPU wants the dim that is summed over, and the rows of `b`, to be
# multiples of 16. Zeros fill them up: they add nothing to a sum. The result is cut to its size.
#
# On a CPU `torch._scaled_mm` takes any layout and size. This page pads and transposes there, too.


def pad16(data: Tensor) -> Tensor:
    """Fill up float8 data [R, C] with zeros to multiples of 16; contiguous along C."""
    R, C = data.shape
    # As bytes, since torch has few operations for float8. The byte of 0.0 is 0.
    padded = F.pad(data.view(torch.uint8), (0, -C % 16, 0, -R % 16))
    return padded.contiguous().view(data.dtype)


def transposed(data: Tensor) -> Tensor:
    """Copy float8 data [R, C] to [C, R]; contiguous along R."""
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def gemm(a, scale_a, b, scale_b, shape: tuple[int, int], dtype: torch.dtype, fast=False) -> Tensor:
    """Multiply `(a * scale_a) @ (b * scale_b).T`, without the rows of padding: [*shape].

    `a` is [R, C] and `b` [S, C], float8, both contiguous along C; C and S are multiples of 16. Sums
    are float32, and rounded once, to `dtype`. `fast`: a GPU may keep fewer bits of its sums.
    """
    a = a[: shape[0]]  # `a` may have any number of rows
    # `b.t()` is no copy: a view [C, S] whose columns are contiguous. torch calls it column-major.
    # The scales multiply the finished sums, so they cost little.
    product = torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast
    )
    return product[:, : shape[1]].contiguous()


# ---------------------------------------------------------------- 5. Forward and backward


class Float8Matmul(torch.autograd.Function):
    """`x @ weight.T`, with all three GEMMs in float8."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        """Return the output [M, N], dtype of `x`, for `x` [M, K] and `weight` [N, K]."""
        M, N = x.shape[0], weight.shape[0]
        x_scale, w_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        x8 = pad16(to_float8(x, x_scale, E4M3))  # [M16, K16]: filled up to multiples of 16
        w8 = pad16(to_float8(weight, w_scale, E4M3))  # [N16, K16]
        output = gemm(x8, x_scale, w8, w_scale, (M, N), x.dtype, fast=True)

        # Kept until backward: x.T in float8, one byte per element, instead of `x`, two or four.
        # The weight exists anyway: backward casts it again, under the same scale.
        ctx.save_for_backward(transposed(x8), x_scale, weight, w_scale)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return grad_input [M, K] and grad_weight [N, K] for `g`, the grad_output [M, N]."""
        x8_t, x_scale, weight, w_scale = ctx.saved_tensors  # x8_t: [K16, M16]
        (M, N), K = g.shape, weight.shape[1]
        g_scale = scale_of(g, E5M2)
        g8 = pad16(to_float8(g, g_scale, E5M2))  # [M16, N16]

        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:  # False if no earlier layer needs a gradient
            w8_t = transposed(pad16(to_float8(weight, w_scale, E4M3)))  # [K16, N16]
            grad_input = gemm(g8, g_scale, w8_t, w_scale, (M, K), g.dtype)
        if ctx.needs_input_grad[1]:  # False for a frozen weight
            g8_t = transposed(g8)  # [N16, M16]
            grad_weight = gemm(g8_t, g_scale, x8_t, x_scale, (N, K), weight.dtype)
        return grad_input, grad_weight


# ---------------------------------------------------------------- 6. The layer, and a whole model


class Float8Linear(nn.Linear):
    """An `nn.Linear` whose GEMMs run in float8. Its Parameters stay in high precision.

    An optimizer's step is often far smaller than 1/16 of a weight: float8 would round it away.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`, [..., N], for an input [..., K]."""
        x = input.reshape(-1, self.in_features)  # [M, K]
        output = Float8Matmul.apply(x, self.weight)  # [M, N]
        output = output.reshape(*input.shape[:-1], self.out_features)
        # The bias is added in high precision. Its gradient [N], the sum of `g`, torch computes.
        return output if self.bias is None else output + self.bias


def convert(model: nn.Module) -> nn.Module:
    """Turn each `nn.Linear` of a model into a `Float8Linear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear  # the same object: Parameters and their names stay
    return model


# ---------------------------------------------------------------- 7. Training


def main() -> None:
    """Train a small model twice from one start: in float32, and in float8."""
    torch.manual_seed(0)
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    device = "cuda" if capable else "cpu"
    plain = nn.Sequential(nn.Linear(30, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    plain = plain.append(nn.Linear(64, 10)).to(device)
    models = {"float32": plain, "float8": convert(copy.deepcopy(plain))}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=5e-3) for name in models}
    for step in range(31):
        x = torch.randn(128, 30, device=device)
        losses = {name: F.mse_loss(models[name](x), x[:, :10].sin()) for name in models}
        for name, loss in losses.items():
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
        if step % 10 == 0:
            print(f"step {step:2d}", *(f"  {k} loss {v.item():.4f}" for k, v in losses.items()))

    print("\nWhat the library adds, in src/float8/:")
    for name, what in LIBRARY.items():
        print(f"  {name:16} {what}")


# ---------------------------------------------------------------- 8. What the library adds

LIBRARY = {
    "kernels": "two kernels cast to both layouts; this page needs about eight passes over a tensor",
    "delayed": "delayed scaling: the scale comes from earlier steps, so a cast reads once",
    "config.py": "recipes: a scale for each row, or for each block of 1x128 or 128x128",
    "gemm.py": "GEMMs under these scales, for the tokens of each expert, or emulated",
    "linear": "autocast, empty inputs, torch.compile, state that survives copies and checkpoints",
    "weights": "weights that are cast once per step, or that exist in float8 only",
    "convert": "which layers gain on your GPU, why the others stay, and the way back",
    "experts": "mixture-of-experts models, with one GEMM for all experts",
    "tensor": "float8 data with a scale as one tensor, also as a Parameter or within a DTensor",
    "fsdp": "weights that FSDP2 gathers in float8: half of the bytes of bfloat16",
    "parallel": "tensor, sequence and expert parallel, with tokens sent in float8; DDP",
    "checkpoints": "models published in float8: read, trained on, written",
    "memory": "activations that are kept in float8, or recomputed except for outputs of GEMMs",
    "integrations": "Hugging Face, Lightning, torchtitan, fairscale",
}


if __name__ == "__main__":
    main()
