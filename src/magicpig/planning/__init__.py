"""Which way of attending suits a model, a context and a machine: `magicpig plan`."""
