"""`python -m ballast`: the `ballast` command."""

from ._cli import main

main()
