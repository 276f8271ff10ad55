"Everything, for notebooks: `from phew_nb.all import *`."
from .files import *
from .models import *
from .data import *
from .graph import *
from .masks import *
from .flow import *
from .walks import *
from .scores import *
from .synflow import *
from .rewire import *
from .metrics import *
from .pruners import *
from .export import *
from .training import *
from .iterative import *
from .experiments import *
from .plots import *
