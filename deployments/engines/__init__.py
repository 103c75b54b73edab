"""Model engines behind one small protocol in token ids."""

import os

# OpenMP reads this when it is loaded, so before any engine. Threads that spin at barriers take
# seconds for a token as soon as anything else wants their core; on a device something always does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
