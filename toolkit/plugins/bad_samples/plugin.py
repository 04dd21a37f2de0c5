"""`data.bad_samples: skip`: lists the samples that cannot be loaded, and ends a run with too many."""

from toolkit.registry import Plugin

PLUGIN = Plugin("bad_samples", hooks={"bad_samples": "toolkit.plugins.bad_samples.listing:BadSamples"})
