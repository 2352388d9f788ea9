"""`Float8Tensor`, and helpers for weights in tensor subclasses and for DTensors."""

from float8.tensor.float8_tensor import Float8Tensor as Float8Tensor
from float8.tensor.float8_tensor import dequantise as dequantise
from float8.tensor.ranks import is_dtensor as is_dtensor
from float8.tensor.ranks import is_fsdp_module as is_fsdp_module
from float8.tensor.ranks import local_tensor as local_tensor
from float8.tensor.ranks import reshard as reshard
from float8.tensor.weights import high_precision as high_precision
