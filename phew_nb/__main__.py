"`python -m phew_nb COMMAND`: the commands, where none is installed."
import sys
from phew_nb.cli import main

sys.exit(main())
