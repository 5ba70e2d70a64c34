"""The queue from one writer to many readers, in shared memory of one host.

`segment` is the memory, `ring` the byte ring over the native extension `_shm_ring`. Importing this
package imports none of them: the extension may not be built."""
