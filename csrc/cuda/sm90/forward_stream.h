// sm90/forward_stream.h: the order of work of windows of one width, in which warpgroups are at different places of their tiles.
// Plain C++: the plan, the kernel and a model of it read the same functions.
//
// A band is 64 query rows of a plane (a head of a sequence), the tile of one warpgroup. In a window each sees n blocks of 64 keys, those
// of band i - 1 one block before those of band i. A block of the grid walks the keys of a plane once, newest first, and its warpgroups
// lie `lag` bands apart, so that they begin and end their tiles `lag` steps apart, past the same keys:
//
//   keys      ... 40 39 38 37 36 35 34 33 32 31 30 29 28 27 26 25 24 23 22 21 20 19 18 17 16 15 ...      n 9, lag 4, period 12
//   group 1       [-------- band 40 -------]          [-------- band 28 -------]          [--
//   group 0    ---]          [-------- band 36 -------]          [-------- band 24 -------]
//   group 2    -- band 44 ---]          [-------- band 32 -------]          [-------- band 20
//
// The bands of a walk are offset + lag * group + period * m. `lag` walks with different offsets cover all bands; so many blocks of the
// grid, a team, make them side by side, so that the keys come from DRAM once. Teams share out the bands of all planes alike.
#pragma once
#include <cstdint>

#include "problem/portable.h"

namespace flash::sm90 {

inline constexpr int kBand = 64;  // rows of a band, keys of a block

// Key blocks [first, last].
struct Blocks {
  int first, last;
  FLASH_HD int count() const { return last - first + 1; }
};

struct Stream {
  int rows, keys, diagonal, left, right;  // row i sees keys [i + diagonal - left, i + diagonal + right], at least one
  int bands;                              // of a plane
  int groups, lag, teams;                 // lag: bands between warpgroups, blocks of a team; teams 0: not in this order
  int share, longer;                      // bands of a team; teams that have one more

  FLASH_HD int period() const { return groups * lag; }

  FLASH_HD Blocks blocks(int band) const {
    const int row = band * kBand, end = row + kBand < rows ? row + kBand : rows;
    const int first = row + diagonal - left, last = end - 1 + diagonal + right;
    return {(first > 0 ? first : 0) / kBand, (last < keys - 1 ? last : keys - 1) / kBand};
  }
};

// A part of a plane that a block of the grid walks: its bands number [from, to), the highest first.
struct Stretch {
  int plane, from, to;
  FLASH_HD bool empty() const { return from >= to; }
};

// What a block of the grid does: stretches of the planes in which its team has a share.
class Walks {
 public:
  FLASH_HD Walks(const Stream& stream, int block) : stream_(stream), offset_(block % stream.lag) {
    const int team = block / stream.lag;
    const int begin = team * stream.share + (team < stream.longer ? team : stream.longer);
    plane_ = begin / stream.bands;
    above_ = begin - plane_ * stream.bands;
    left_ = stream.share + (team < stream.longer ? 1 : 0);
  }

  // The next stretch, which may be empty; false if there are no more.
  FLASH_HD bool next(Stretch* stretch) {
    if (left_ == 0) return false;
    const int top = stream_.bands - above_, count = left_ < top ? left_ : top;
    *stretch = {plane_++, number_below(top - count), number_below(top)};
    above_ = 0;
    left_ -= count;
    return true;
  }

  // The band of a number, and whose it is: numbers go round the warpgroups.
  FLASH_HD int group(int number) const { return number % stream_.groups; }
  FLASH_HD int band(int number) const {
    return offset_ + number / stream_.groups * stream_.period() + number % stream_.groups * stream_.lag;
  }

 private:
  // How many bands of this walk lie below `band`.
  FLASH_HD int number_below(int band) const {
    if (band <= offset_) return 0;
    const int periods = (band - offset_) / stream_.period(), rest = band - offset_ - periods * stream_.period();
    return periods * stream_.groups + (rest + stream_.lag - 1) / stream_.lag;
  }

  const Stream& stream_;
  int offset_;
  int plane_, above_, left_;  // next plane, bands of it that others have, bands that are left of the share
};

// Bands a block of the grid may have: each has a bit of shared memory.
inline constexpr int kMostBands = 4096;

// The order for `planes` planes in which row i sees keys [i + diagonal - left, i + diagonal + right], on `blocks` blocks of `groups`
// warpgroups with rings of `stages`; 0 teams where it does not fit or pay. Between its tiles a warpgroup passes period - n elements,
// while the others work: the more the longer its change may take, but not more than the ring has, or it waits for them. Where a plane
// or a share begins, and where a share ends, warpgroups come and go one by one, and some idle for (groups - 1) * lag steps: short planes
// lose more than they gain.
inline Stream plan_stream(int64_t planes, int rows, int keys, int diagonal, int left, int right, int groups, int stages,
                          int blocks) {
  constexpr int kLeastBlocks = 8, kMostBlocks = 40, kLeastPeriods = 6;
  Stream stream{rows, keys, diagonal, left, right, (rows + kBand - 1) / kBand, groups, 1, 0, 0, 0};
  const bool narrow = left >= 0 && right >= 0 && left <= kBand * kMostBlocks && right <= kBand * kMostBlocks;
  // All rows see a key, so that lower bands see older keys.
  if (!narrow || diagonal + right < 0 || rows - 1 + diagonal - left > keys - 1) return stream;
  const auto block_of = [](int key) { return key >= 0 ? key / kBand : -((kBand - 1 - key) / kBand); };
  const int most = block_of(kBand - 1 + diagonal + right) - block_of(diagonal - left) + 1;
  if (most < kLeastBlocks || most > kMostBlocks) return stream;
  const int64_t total = planes * stream.bands;
  for (stream.lag = (most + stages - 1) / groups; stream.period() >= most; --stream.lag) {
    const int64_t teams = blocks / stream.lag, period = stream.period(), least = kLeastPeriods * period;
    const bool idle = 32 * teams * stream.lag < 31 * int64_t{blocks}, wide = 2 * period > 3 * most;
    if (teams == 0 || idle || wide || stream.bands < least || total / teams < least) continue;
    if (total / teams > kMostBands / 2 * stream.lag) continue;
    stream.teams = static_cast<int>(teams);
    stream.share = static_cast<int>(total / teams);
    stream.longer = static_cast<int>(total % teams);
    return stream;
  }
  return stream;
}

}  // namespace flash::sm90
