// y = x^2 and dx = 2 x dy, elementwise on [planes, rows, cols].
//
// Every tensor brings its own strides, in elements and 64 bits wide. T is float, double, float16 or bfloat16.
// A thread owns one column, so that a warp reads one run of memory; it walks rows and planes, whose number may
// exceed what the y and z of a grid can hold (65,535).

#define FOR_EACH_ELEMENT                                                                                   \
  const long long col = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;                     \
  if (col >= cols) return;                                                                                 \
  for (long long plane = blockIdx.z; plane < planes; plane += gridDim.z)                                   \
    for (long long row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += gridDim.y * blockDim.y)

extern "C" __global__ void square_forward(
    const T* x, long long x_plane_stride, long long x_row_stride, long long x_col_stride,
    T* y, long long y_plane_stride, long long y_row_stride, long long y_col_stride,
    long long planes, long long rows, long long cols) {
  FOR_EACH_ELEMENT {
    const auto x_here = value(x[plane * x_plane_stride + row * x_row_stride + col * x_col_stride]);
    y[plane * y_plane_stride + row * y_row_stride + col * y_col_stride] = rounded<T>(x_here * x_here);
  }
}

extern "C" __global__ void square_backward(
    const T* x, long long x_plane_stride, long long x_row_stride, long long x_col_stride,
    const T* dy, long long dy_plane_stride, long long dy_row_stride, long long dy_col_stride,
    T* dx, long long dx_plane_stride, long long dx_row_stride, long long dx_col_stride,
    long long planes, long long rows, long long cols) {
  FOR_EACH_ELEMENT {
    const auto x_here = value(x[plane * x_plane_stride + row * x_row_stride + col * x_col_stride]);
    const auto dy_here = value(dy[plane * dy_plane_stride + row * dy_row_stride + col * dy_col_stride]);
    dx[plane * dx_plane_stride + row * dx_row_stride + col * dx_col_stride] = rounded<T>(2 * x_here * dy_here);
  }
}
