// Copies many pieces of device memory into one, or one into many.
//
// pieces.ptx is made of this file by NVRTC 12.9, for compute_60, and is what a driver
// loads; `nvcc -ptx -arch=compute_60 pieces.cu` of CUDA 12 is another way. It was changed to
// say `.version 7.0`, which is all it needs: drivers since CUDA 11.0 take it.

typedef unsigned long long u64;

// `table` holds `count` addresses, and then `count + 1` offsets in the one piece.
// Blocks of threads share the pieces in x, and each piece in y.
extern "C" __global__ void move_pieces(const u64* table, u64 count, u64 one, u64 gathers) {
  const u64* offsets = table + count;
  u64 first = (u64)blockIdx.y * blockDim.x + threadIdx.x;
  u64 step = (u64)gridDim.y * blockDim.x;
  for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
    u64 n = offsets[i + 1] - offsets[i], there = one + offsets[i];
    u64 to = gathers ? there : table[i], from = gathers ? table[i] : there;
    if ((to | from | n) % 16 == 0) {
      for (u64 k = first; k < n / 16; k += step) ((uint4*)to)[k] = ((const uint4*)from)[k];
    } else if ((to | from | n) % 4 == 0) {
      for (u64 k = first; k < n / 4; k += step)
        ((unsigned int*)to)[k] = ((const unsigned int*)from)[k];
    } else {
      for (u64 k = first; k < n; k += step)
        ((unsigned char*)to)[k] = ((const unsigned char*)from)[k];
    }
  }
}
