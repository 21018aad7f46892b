"""What recipes of these tests know by name."""

import planned  # noqa: F401, a rule that breaks the proof
