"""Hand-written kernels, each where a measurement asks for one.

The rule: a kernel stands beside a plain twin that gives the same result and runs on a CPU, behind one entry point that
chooses between the two by device, sizes and rows. Callers know the entry point alone; tests compare kernel and twin.

The places that kernels go behind are already single functions: `jaxspec.model.layers.paged_attention.attend_paged` for
attention over the pages of a cache, `jaxspec.model.layers.experts.Experts.__call__` for routed experts, and
`jaxspec.model.quantization.scheme.Scheme.multiply` for the weights of one scheme.
"""
