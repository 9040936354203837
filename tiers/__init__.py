"""Places where KV chunks live below the GPU, and the engines that copy them there."""
