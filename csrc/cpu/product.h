// cpu/product.h: the product of bf16 matrices with what this file is compiled for.
#pragma once
#if defined(__AMX_BF16__)
#include "cpu/amx.h"
#else
#include "cpu/dot.h"
#endif
