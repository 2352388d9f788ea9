"""Experts: linear layers with one weight for each group of rows."""

from float8.experts.functional import grouped_linear as grouped_linear
from float8.experts.gather import GatherExperts as GatherExperts
from float8.experts.module import ExpertsWeight as ExpertsWeight
from float8.experts.module import Float8Experts as Float8Experts
from float8.experts.module import convert_experts as convert_experts
from float8.experts.module import kind_of as kind_of
from float8.experts.module import stored_by_rows as stored_by_rows
from float8.experts.module import unsupported_experts as unsupported_experts
from float8.experts.module import weights_of as weights_of
