// Rotary position embedding of one tensor [batch, seq, heads, head_dim], or of two in one launch, out of place.
//
// Every tensor brings its own strides, in elements and 64 bits wide. One block a token. threadIdx.x shares the dimensions, a run
// each, and threadIdx.y the heads, so that a thread reads cos and sin once for all its heads. A pair of dimensions is read once and
// written once by one thread, so nothing needs a barrier, and y may be x.

constexpr int PAIRS = Run<T>::SIZE;  // that a thread turns at a time
using Wide = decltype(value(T()));
struct Angles { Wide cos[PAIRS], sin[PAIRS]; };

// Position of (batch, seq): given as 32-bit words, one or two a position (little end first), or none: then it is seq itself.
__device__ long long position_of(const int* words, int count, long long at, long long seq) {
  if (count == 0) return seq;
  const long long low = words[at];
  return count == 1 ? low : static_cast<long long>(words[at + 1]) << 32 | (low & 0xffffffffll);
}

// `count` entries of one row of a table. A position that the table does not have is no row: NaN.
__device__ void read_table(const U* row, long long stride, int count, bool inside, Wide* to) {
  constexpr int SIZE = Run<U>::SIZE < PAIRS ? Run<U>::SIZE : PAIRS;
#pragma unroll
  for (int start = 0; start < PAIRS; start += SIZE) {
    Run<U> run;
    run.load(row + start * stride, stride, inside ? count - start : 0);
#pragma unroll
    for (int i = 0; i < SIZE; i++) to[start + i] = inside ? value(run.at[i]) : __uint_as_float(0x7fc00000u);
  }
}

__device__ void turn(T& a, T& b, Wide c, Wide s) {
  const Wide x_a = value(a), x_b = value(b);
  a = rounded<T>(x_a * c - x_b * s);
  b = rounded<T>(x_b * c + x_a * s);
}

// Where a thread is at work: one head of x or of k, at the block's token.
struct Head { const T* from; long long from_stride; T* to; long long to_stride; bool turns; };

// The pairs from `pair` on.
__device__ void turn_pairs(const Head& head, int half, int pair, bool interleaved, const Angles& by) {
  const int count = min(PAIRS, half - pair);
  const int dim = interleaved ? 2 * pair : pair, other_dim = interleaved ? dim + PAIRS : pair + half;
  const int in_run = interleaved ? min(PAIRS, 2 * count) : count, in_other = interleaved ? 2 * count - in_run : count;
  Run<T> run, other;
  run.load(head.from + dim * head.from_stride, head.from_stride, in_run);
  other.load(head.from + other_dim * head.from_stride, head.from_stride, in_other);
  if (head.turns) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      if (!interleaved) turn(run.at[i], other.at[i], by.cos[i], by.sin[i]);
      else if (i < PAIRS / 2) turn(run.at[2 * i], run.at[2 * i + 1], by.cos[i], by.sin[i]);
      else turn(other.at[2 * i - PAIRS], other.at[2 * i + 1 - PAIRS], by.cos[i], by.sin[i]);
    }
  }
  run.store(head.to + dim * head.to_stride, head.to_stride, in_run);
  other.store(head.to + other_dim * head.to_stride, head.to_stride, in_other);
}

// y is x turned, and l is k turned; k_heads is 0 where there is no k. U is the type of the tables.
extern "C" __global__ void rotary(
    const T* x, long long x_batch_stride, long long x_seq_stride, long long x_head_stride, long long x_dim_stride,
    T* y, long long y_batch_stride, long long y_seq_stride, long long y_head_stride, long long y_dim_stride,
    const T* k, long long k_batch_stride, long long k_seq_stride, long long k_head_stride, long long k_dim_stride,
    T* l, long long l_batch_stride, long long l_seq_stride, long long l_head_stride, long long l_dim_stride,
    const U* cos, long long cos_position_stride, long long cos_dim_stride,
    const U* sin, long long sin_position_stride, long long sin_dim_stride,
    const int* positions, int position_words, long long position_batch_stride, long long position_seq_stride,
    unsigned seq_len, long long table_len, int heads, int k_heads, int head_dim, int half,
    int first_head, int end_head, bool interleaved, float sign) {
  const long long batch = blockIdx.x / seq_len, seq = blockIdx.x % seq_len;
  const long long position =
      position_of(positions, position_words, batch * position_batch_stride + seq * position_seq_stride, seq);
  const bool inside = position >= 0 && position < table_len;
  cos += inside ? position * cos_position_stride : 0;
  sin += inside ? position * sin_position_stride : 0;
  x += batch * x_batch_stride + seq * x_seq_stride;
  y += batch * y_batch_stride + seq * y_seq_stride;
  k += batch * k_batch_stride + seq * k_seq_stride;
  l += batch * l_batch_stride + seq * l_seq_stride;
  const auto head_at = [&](int head) -> Head {
    if (head < heads)
      return {x + head * x_head_stride, x_dim_stride, y + head * y_head_stride, y_dim_stride,
              head >= first_head && head < end_head};
    return {k + (head - heads) * k_head_stride, k_dim_stride, l + (head - heads) * l_head_stride, l_dim_stride, true};
  };
  for (int pair = threadIdx.x * PAIRS; pair < half; pair += blockDim.x * PAIRS) {
    Angles by;
    read_table(cos + pair * cos_dim_stride, cos_dim_stride, half - pair, inside, by.cos);
    read_table(sin + pair * sin_dim_stride, sin_dim_stride, half - pair, inside, by.sin);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) by.sin[i] *= sign;
    for (int head = threadIdx.y; head < heads + k_heads; head += blockDim.y)
      turn_pairs(head_at(head), half, pair, interleaved, by);
  }
  for (int dim = 2 * half + threadIdx.x * PAIRS; dim < head_dim; dim += blockDim.x * PAIRS)  // these pass through
    for (int head = threadIdx.y; head < heads + k_heads; head += blockDim.y) {
      const Head at = head_at(head);
      Run<T> run;
      run.load(at.from + dim * at.from_stride, at.from_stride, head_dim - dim);
      run.store(at.to + dim * at.to_stride, at.to_stride, head_dim - dim);
    }
}
