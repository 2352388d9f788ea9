"""`Float8Linear`, its base class, the function `linear`, and a test of what is unsupported."""

from float8.linear.base import Float8Module as Float8Module
from float8.linear.functional import linear as linear
from float8.linear.module import Float8Linear as Float8Linear
from float8.linear.module import unsupported as unsupported
