"""`python -m gradwire`: see `python -m gradwire --help`."""

import sys

from ._demo import main

sys.exit(main())
