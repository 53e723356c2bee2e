// 16-bit floating point for kernels that include nothing; cuda.py puts this before every .cu.
// A kernel reads with value(x), computes in what that returns, and stores rounded<T>(result).
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

__device__ inline double value(double x) { return x; }
__device__ inline float value(float x) { return x; }
__device__ inline float value(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

template <typename T, typename Wide> __device__ T rounded(Wide x) { return static_cast<T>(x); }

template <> __device__ inline bfloat16 rounded<bfloat16, float>(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};  // NaN, which rounding could turn into infinity
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};  // to nearest, ties to even
}

#ifdef __CUDACC_RTC__  // the GPU's own conversions
__device__ inline float value(float16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
template <> __device__ inline float16 rounded<float16, float>(float x) {
  float16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
  return narrow;
}
// In one instruction: the compiler would merge a plain store with the single stores of another branch.
__device__ inline void store_16_bytes(void* to, const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
}
#else  // by bits: g++ before 12 has no _Float16
inline void store_16_bytes(void* to, const void* from) { std::memcpy(to, from, 16); }
inline float value(float16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | magnitude << 13);  // infinity, NaN
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}
template <> inline float16 rounded<float16, float>(float x) {
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
  unsigned bits = __float_as_uint(x) & 0x7fffffffu;
  if (bits > 0x7f800000u) bits = 0x7e00u;        // NaN
  else if (bits >= 0x477ff000u) bits = 0x7c00u;  // 65520 and more: infinity
  else if (bits < 0x38800000u) bits = __float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u;  // subnormal
  else bits = (bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13;
  return {static_cast<unsigned short>(sign | bits)};
}
#endif

// A run: 16 bytes of neighbours, which one instruction loads or stores where the tensor's memory holds them side by side; any
// other tensor's are gathered one by one.
template <typename T> struct Run {
  static constexpr int SIZE = 16 / sizeof(T);
  alignas(16) T at[SIZE];

  static __device__ bool side_by_side(const T* first, long long stride, int count) {
    return stride == 1 && count >= SIZE && reinterpret_cast<unsigned long long>(first) % 16 == 0;
  }
  // The first `count` elements; the others are not read.
  __device__ void load(const T* first, long long stride, int count) {
    if (side_by_side(first, stride, count)) {
      *this = *reinterpret_cast<const Run*>(first);
    } else if (stride == 0 && count > 0) {
      const T one = *first;
#pragma unroll
      for (int i = 0; i < SIZE; i++) at[i] = one;
    } else {
#pragma unroll
      for (int i = 0; i < SIZE; i++) at[i] = i < count ? first[i * stride] : T();
    }
  }
  __device__ void store(T* first, long long stride, int count) const {
    if (side_by_side(first, stride, count)) {
      store_16_bytes(first, at);
    } else {
#pragma unroll
      for (int i = 0; i < SIZE; i++)
        if (i < count) first[i * stride] = at[i];
    }
  }
};
