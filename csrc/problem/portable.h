// problem/portable.h: lets the plain C++ of this room compile for host and device alike.
#pragma once

#if defined(__CUDACC__)
#define FLASH_HD __host__ __device__ __forceinline__
#else
#define FLASH_HD inline
#endif
