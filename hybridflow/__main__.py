"""`python -m hybridflow`: hands over to the command line."""

import sys

from hybridflow.cli import main

sys.exit(main())
