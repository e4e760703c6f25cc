// The tiles of a grouped product. Rows lie in groups, one after the other, such as the tokens of experts, and only the device
// knows where a group ends. Each block counts tiles by itself from these ends, so that the host does not wait for them and a
// captured CUDA graph stays correct when they change.
#pragma once

#include <cstdint>

namespace minfer {

constexpr int kMostGroups = 512;

// Rows of one group, for one tile: `begin` is the first among all rows, `rows` is how many there are up to the end of the group
// or of the tile. `row` and `col` are the tile's place in the product of its group.
struct GroupTile {
  int group, begin, rows, row, col;
};

// In shared memory; filled by all threads of a block, and then read by any.
template <int kRows>
struct RowGroups {
  int begin[kMostGroups + 1];  // of each group's rows
  int first[kMostGroups + 1];  // of each group's tiles, for a product with one column of tiles
  int groups;

  // `ends` should ascend from 0 to `all`; those that do not are clamped.
  __device__ void count(const int32_t* ends, int count, int all) {
    if (threadIdx.x < 32) {
      int row = 0, tile = 0;  // of the groups before
      for (int base = 0; base < count; base += 32) {
        const int group = base + threadIdx.x;
        int end = group < count ? min(max(ends[group], 0), all) : row;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) end = max(end, __shfl_up_sync(0xffffffff, end, by));
        end = max(end, row);
        const int before = __shfl_up_sync(0xffffffff, end, 1), from = threadIdx.x ? before : row;
        const int own = (end - from + kRows - 1) / kRows;  //@ last_rows
        int sum = own;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const int other = __shfl_up_sync(0xffffffff, sum, by);
          if (threadIdx.x >= by) sum += other;
        }
        if (group < count) begin[group] = from, first[group] = tile + sum - own;
        row = __shfl_sync(0xffffffff, end, 31), tile += __shfl_sync(0xffffffff, sum, 31);
      }
      if (threadIdx.x == 0) begin[count] = row, first[count] = tile, groups = count;
    }
    __syncthreads();
  }

  // The number of tiles of a product with `across` columns of tiles.
  __device__ int tiles(int across) const { return first[groups] * across; }

  // The tile with this number. The tiles of a group follow each other. Within a group they go down `high` tiles before they go
  // on to the next column, so that tiles that are multiplied at the same time share rows and columns in the L2.
  __device__ GroupTile find(int tile, int across, int high) const {
    const int down = tile / across;
    int group = 0, behind = groups;  // first[group] <= down < first[behind]
    while (behind - group > 1) {
      const int middle = (group + behind) / 2;
      (first[middle] <= down ? group : behind) = middle;
    }
    const int within = tile - first[group] * across, tiles_down = first[group + 1] - first[group];
    const int strip = within / (high * across) * high, in_strip = within - strip * across;
    const int rows = min(high, tiles_down - strip), row = strip + in_strip % rows;
    const int from = begin[group] + row * kRows;
    return {group, from, min(kRows, begin[group + 1] - from), row, in_strip / rows};
  }
};

}  // namespace minfer
