"""Scripts, each made to be run by itself; as a package they find each other as scripts do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
