// problem/philox.h: dropout as a function of coordinates, so that the mask depends on neither tiling, threads nor device.
// Philox4x32-7 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). One call serves 8 elements of a 16 x 16
// patch of one head: rows {r, r + 8} x columns {2c, 2c + 1, 2c + 8, 2c + 9}, the fragment that one lane holds in mma.m16n8k16.
#pragma once
#include <cstdint>

#include "problem/portable.h"

namespace flash::problem {

struct Philox {
  uint32_t word[4];
};

struct Dropout {
  uint64_t key;     // from the seed words
  uint32_t stream;  // from the second seed word
  uint32_t keep;    // an element stays if its 16 bits are below this: round((1 - p) * 65536)

  // Lane 0..31 of patch (row / 16, col / 16) of head `plane` = batch * heads + head.
  FLASH_HD Philox draw(int64_t plane, int64_t row_patch, int64_t col_patch, uint32_t lane) const {
    uint32_t c0 = static_cast<uint32_t>(col_patch) * 32u + lane, c1 = static_cast<uint32_t>(row_patch);
    uint32_t c2 = static_cast<uint32_t>(plane), c3 = stream;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 7; ++round) {
      const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
      const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(b);
      c3 = static_cast<uint32_t>(a);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
  }

  // Which of a lane's 8 sixteen-bit numbers belongs to (row, col): word = column half * 2 + row half, low half for even columns.
  static FLASH_HD uint32_t lane_of(int64_t row, int64_t col) { return static_cast<uint32_t>((row & 7) * 4 + ((col & 7) >> 1)); }
  static FLASH_HD uint32_t bits_of(const Philox& r, int64_t row, int64_t col) {
    const uint32_t left = (row & 8) ? r.word[1] : r.word[0], right = (row & 8) ? r.word[3] : r.word[2];
    const uint32_t word = (col & 8) ? right : left;  // no index: on a GPU it would put the words into memory
    return (col & 1) ? word >> 16 : word & 0xffffu;
  }

  FLASH_HD bool keeps(int64_t plane, int64_t row, int64_t col) const {
    return bits_of(draw(plane, row >> 4, col >> 4, lane_of(row, col)), row, col) < keep;
  }
};

// seed: two words of 64 bits, for instance two doubles in [0, 1) seen as bits.
FLASH_HD Dropout dropout(const uint64_t* seed, double p) {
  const uint64_t a = seed[0], b = seed[1];
  const uint64_t mixed = a ^ (b * 0x9E3779B97F4A7C15ull);
  return {mixed, static_cast<uint32_t>(b ^ (b >> 32)), static_cast<uint32_t>((1.0 - p) * 65536.0 + 0.5)};
}

}  // namespace flash::problem
