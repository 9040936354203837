// A list of copies between the GPU and registered host memory, for pages so small that the copy
// engine spends more time on a descriptor than on its bytes.
//
// `list` is [3, count]: targets, sources, sizes in bytes; every number is a multiple of 16. Each warp
// takes every n-th copy and keeps 2 KiB of it in flight, so the bytes in flight do not depend on the
// size of the copies.
//
// copy_list.ptx is made from this file (tests/tiers/copy/test_cuda_kernel.py says how); the tests also
// compile it for the host and run it there.

#define WARP 32
#define UNROLL 4

#ifdef __cplusplus
extern "C"
#endif
__global__ void kvtiers_copy_list(const long long *list, long long count)
{
    const long long lane = threadIdx.x % WARP;
    const long long warps = (long long)gridDim.x * blockDim.x / WARP;
    long long copy = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP;

    for (; copy < count; copy += warps) {
        uint4 *to = (uint4 *)list[copy];
        const uint4 *from = (const uint4 *)list[count + copy];
        const long long vectors = list[2 * count + copy] / 16;

#pragma unroll 1
        for (long long start = lane; start < vectors; start += UNROLL * WARP) {
            uint4 held[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; i++)
                if (start + i * WARP < vectors) held[i] = from[start + i * WARP];
#pragma unroll
            for (int i = 0; i < UNROLL; i++)
                if (start + i * WARP < vectors) to[start + i * WARP] = held[i];
        }
    }
}
