"""How long a process may take: no test depends on how busy the machine is."""

HANGS = 1200.0
"""Seconds after which it hangs for sure. Below pytest's own limit, so that it is ended and says
where; and below the half hour that collectives wait for a rank that is gone."""
