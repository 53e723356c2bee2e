// y = x^2 and dx = 2 x dy, elementwise on [planes, rows, cols].
//
// Every tensor brings its own strides, in elements and 64 bits wide. T is float, double, float16 or bfloat16.
// A thread owns a run of neighbouring columns, so that a warp reads one stretch of memory; it walks rows and planes, whose number
// may exceed what the y and z of a grid can hold (65,535).

#define FOR_EACH_RUN                                                                                              \
  const long long col = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * Run<T>::SIZE;           \
  if (col >= cols) return;                                                                                        \
  const int count = min(cols - col, static_cast<long long>(Run<T>::SIZE));                                        \
  for (long long plane = blockIdx.z; plane < planes; plane += gridDim.z)                                          \
    for (long long row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += gridDim.y * blockDim.y)

extern "C" __global__ void square_forward(
    const T* x, long long x_plane_stride, long long x_row_stride, long long x_col_stride,
    T* y, long long y_plane_stride, long long y_row_stride, long long y_col_stride,
    long long planes, long long rows, long long cols) {
  FOR_EACH_RUN {
    Run<T> here;
    here.load(x + plane * x_plane_stride + row * x_row_stride + col * x_col_stride, x_col_stride, count);
#pragma unroll
    for (int i = 0; i < here.SIZE; i++) here.at[i] = rounded<T>(value(here.at[i]) * value(here.at[i]));
    here.store(y + plane * y_plane_stride + row * y_row_stride + col * y_col_stride, y_col_stride, count);
  }
}

extern "C" __global__ void square_backward(
    const T* x, long long x_plane_stride, long long x_row_stride, long long x_col_stride,
    const T* dy, long long dy_plane_stride, long long dy_row_stride, long long dy_col_stride,
    T* dx, long long dx_plane_stride, long long dx_row_stride, long long dx_col_stride,
    long long planes, long long rows, long long cols) {
  FOR_EACH_RUN {
    Run<T> here, dy_here;
    here.load(x + plane * x_plane_stride + row * x_row_stride + col * x_col_stride, x_col_stride, count);
    dy_here.load(dy + plane * dy_plane_stride + row * dy_row_stride + col * dy_col_stride, dy_col_stride, count);
#pragma unroll
    for (int i = 0; i < here.SIZE; i++) here.at[i] = rounded<T>(2 * value(here.at[i]) * value(dy_here.at[i]));
    here.store(dx + plane * dx_plane_stride + row * dx_row_stride + col * dx_col_stride, dx_col_stride, count);
  }
}
