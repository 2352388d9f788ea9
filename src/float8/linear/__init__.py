"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.base import Float8Module as Float8Module
from float8.linear.functional import linear as linear
from float8.linear.module import Float8Linear as Float8Linear
from float8.linear.module import unsupported as unsupported
