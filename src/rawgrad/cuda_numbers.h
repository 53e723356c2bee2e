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
#else  // by bits: g++ before 12 has no _Float16
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
