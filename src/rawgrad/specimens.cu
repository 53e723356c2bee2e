// dx = 3 dy, where dx is contiguous: by a kernel that is given a pointer, and by one that is given strides, too.

extern "C" __global__ void triple_flat(const T* dy, T* dx, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) dx[i] = rounded<T>(3 * value(dy[i]));
}

extern "C" __global__ void triple(
    const T* dy, long long dy_row_stride, long long dy_col_stride, T* dx, long long cols, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) dx[i] = rounded<T>(3 * value(dy[i / cols * dy_row_stride + i % cols * dy_col_stride]));
}
