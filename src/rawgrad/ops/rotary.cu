// Rotary position embedding of one tensor [batch, seq, heads, head_dim], or of two in one launch, out of place.
//
// Every tensor brings its own strides, in elements and 64 bits wide. One block a token, whose threads share the token's
// heads and dimensions; a pair of dimensions is read once and written once, so nothing needs a barrier.

struct Layout { long long batch, seq, head, dim; };  // strides

// Position of (batch, seq): given as 32-bit words, one or two a position (little end first), or none: then it is seq itself.
__device__ long long position_of(const int* words, int count, long long at, long long seq) {
  if (count == 0) return seq;
  const long long low = words[at];
  return count == 1 ? low : static_cast<long long>(words[at + 1]) << 32 | (low & 0xffffffffll);
}

__device__ void rotate(
    const T* x, Layout x_stride, T* y, Layout y_stride, long long heads, long long head_dim, long long half,
    long long first_head, long long end_head, bool interleaved, long long batch, long long seq,
    const U* cos, long long cos_dim_stride, const U* sin, long long sin_dim_stride, bool inside, float sign) {
  x += batch * x_stride.batch + seq * x_stride.seq;
  y += batch * y_stride.batch + seq * y_stride.seq;
  const long long each = head_dim - half;  // a head: its pairs, and then the dimensions that pass through
  for (long long i = threadIdx.x; i < heads * each; i += blockDim.x) {
    const long long head = i / each, pair = i % each;
    const T* from = x + head * x_stride.head;
    T* to = y + head * y_stride.head;
    if (pair >= half) {
      const long long dim = pair + half;
      to[dim * y_stride.dim] = from[dim * x_stride.dim];
      continue;
    }
    const long long a = interleaved ? 2 * pair : pair, b = interleaved ? a + 1 : pair + half;
    if (head < first_head || head >= end_head) {
      to[a * y_stride.dim] = from[a * x_stride.dim];
      to[b * y_stride.dim] = from[b * x_stride.dim];
      continue;
    }
    const auto x_a = value(from[a * x_stride.dim]), x_b = value(from[b * x_stride.dim]);
    auto c = x_a, s = x_a;
    if (inside) {
      c = value(cos[pair * cos_dim_stride]);
      s = sign * value(sin[pair * sin_dim_stride]);
    } else {
      c = s = __uint_as_float(0x7fc00000u);  // a position that the tables do not have: NaN
    }
    to[a * y_stride.dim] = rounded<T>(x_a * c - x_b * s);
    to[b * y_stride.dim] = rounded<T>(x_b * c + x_a * s);
  }
}

// y rotates x, and l rotates k; k_heads is 0 where there is no k. U is the type of the tables.
extern "C" __global__ void rotary(
    const T* x, long long x_batch_stride, long long x_seq_stride, long long x_head_stride, long long x_dim_stride,
    T* y, long long y_batch_stride, long long y_seq_stride, long long y_head_stride, long long y_dim_stride,
    const T* k, long long k_batch_stride, long long k_seq_stride, long long k_head_stride, long long k_dim_stride,
    T* l, long long l_batch_stride, long long l_seq_stride, long long l_head_stride, long long l_dim_stride,
    const U* cos, long long cos_position_stride, long long cos_dim_stride,
    const U* sin, long long sin_position_stride, long long sin_dim_stride,
    const int* positions, int position_words, long long position_batch_stride, long long position_seq_stride,
    long long seq_len, long long table_len, long long heads, long long k_heads, long long head_dim, long long half,
    long long first_head, long long end_head, bool interleaved, float sign) {
  const long long batch = blockIdx.x / seq_len, seq = blockIdx.x % seq_len;
  const long long position =
      position_of(positions, position_words, batch * position_batch_stride + seq * position_seq_stride, seq);
  const bool inside = position >= 0 && position < table_len;
  const U* cos_row = cos + (inside ? position * cos_position_stride : 0);
  const U* sin_row = sin + (inside ? position * sin_position_stride : 0);
  rotate(x, {x_batch_stride, x_seq_stride, x_head_stride, x_dim_stride},
         y, {y_batch_stride, y_seq_stride, y_head_stride, y_dim_stride}, heads, head_dim, half, first_head, end_head,
         interleaved, batch, seq, cos_row, cos_dim_stride, sin_row, sin_dim_stride, inside, sign);
  if (k_heads > 0)
    rotate(k, {k_batch_stride, k_seq_stride, k_head_stride, k_dim_stride},
           l, {l_batch_stride, l_seq_stride, l_head_stride, l_dim_stride}, k_heads, head_dim, half, 0, k_heads,
           interleaved, batch, seq, cos_row, cos_dim_stride, sin_row, sin_dim_stride, inside, sign);
}
