// Which of hgemm's kernels takes the least time on an H100 or H200, by models of their times.
//
// Most models have one form: a constant, plus the time of the waves of tiles or that of the bytes, whichever is longer; if
// these are about equal, somewhat more than either. Those of v20_any_columns and v21_row_pairs differ. Times are in
// microseconds. v18_fitted chooses its tiles by its model, too. On an H200 the models for up to 64 rows were fitted to half of
// 4,000 cold timings of random products with up to 32 rows; of the others that of v17_one_wave to 984 and that of v21_row_pairs
// to 1,037. That of v14_stream_k was fitted to half of 1,059 ratios of its time to v18_fitted's; for up to 512 rows its rate of
// the memory was fitted to half of its times. The model of v14_small was fitted to all of its times in one wave with 65 to 512
// rows. benchmarks/kernel_times.py has these times, and says how good the choice is.
#include <cstdio>
#include <iterator>
#include <utility>

#include "cuda/gemm/fitted_choice.h"

namespace minfer {
namespace {

constexpr std::array<int, 4> kAtOnce = {132, 66, 31, 15};  // clusters of 1, 2, 4 and 8 blocks that run at once on an H100 or H200
constexpr double kCyclesPerUs = 1755;
constexpr double kOfCopy = 3.3e6, kOfMemory = 2.5e6, kOfL2 = 3.5e6;  // bytes a microsecond

struct Product {
  int m, n, k;
  bool tn;
};

// With up to so many rows, reading b takes most of the time, and the models have constants of their own.
constexpr int kFewRows = 64;

double bytes_of(const Product& p) { return 2.0 * (double(p.m) * p.k + double(p.n) * p.k + double(p.m) * p.n); }

// The time of few rows; `body` is that of the waves of tiles. The last wave of several has fewer tiles, which read more slowly:
// `missing` is the number of empty places in it, divided by the number of tiles.
double of_few_rows(const Product& p, double constant, double body, double bytes_per_us, double missing, double weight) {
  const double memory = bytes_of(p) / bytes_per_us * (1 + weight * missing);
  return constant + std::sqrt(std::sqrt(fourth(body) + fourth(memory)));
}

// A warp has 16 columns, and the warps of a block divide k (`launch_layout` of gemv.cuh).
double gemv(const Product& p) {
  if (p.m > 8 || !p.tn || p.n % 8 != 0 || p.k % 8 != 0) return INFINITY;
  const int64_t sms = kAtOnce[0], blocks = (int64_t(p.n) + 15) / 16, batches = (int64_t(p.k) + 127) / 128;
  int64_t warps = 1;
  while (2 * warps <= std::min<int64_t>(16, batches) && (warps < 4 || 2 * warps * blocks <= 24 * sms)) warps *= 2;
  const int64_t at_once = sms * (24 / warps), waves = (blocks + at_once - 1) / at_once;
  const double body = double(waves * ((batches + warps - 1) / warps)) * 2602 / kCyclesPerUs;
  return of_few_rows(p, 5.055, body, 3.902e6, 0, 0);
}

// Whether rows of b do not start at multiples of 16 bytes.
bool has_unaligned_rows(const Product& p) { return (p.tn ? p.k : p.n) % 8 != 0; }

// v18_fitted's time for few rows, which one tile covers. A step in k takes the same time for every size of tile.
double fitted_few_rows(const Product& p, const FittedChoice& of) {
  const FittedTile& tile = of.tile;
  const int64_t sms = kAtOnce[0], wide = group_of(tile.sharing, of.beside).across * tile.cols;
  const int64_t blocks = (p.n + wide - 1) / wide * tile.sharing * of.parts, waves = (blocks + sms - 1) / sms;
  const int steps = ((p.k + 63) / 64 + of.parts - 1) / of.parts;
  const double idle = 1 - std::min(1.0, double(blocks) / sms), missing = waves > 1 ? double(waves * sms) / blocks - 1 : 0;
  const double body = waves * steps * 143.4 * (1 + 0.6006 * idle) / kCyclesPerUs;
  const double sums = of.parts > 1 ? 0.5805 + 0.6525e-4 * tile.rows * tile.cols * of.parts : 0;
  return of_few_rows(p, p.tn ? 6.241 : 5.817, body, 4.332e6, missing, 0.1137) + sums;
}

// v18_fitted first copies operands with unaligned rows, both in one launch.
double fitted(const Product& p) {
  const double elements = (p.k % 8 != 0 ? double(p.m) * p.k : 0) + (has_unaligned_rows(p) ? double(p.n) * p.k : 0);
  const double copied = elements > 0 ? 5 + 4 * elements / kOfCopy : 0;
  const FittedChoice of = choose_fitted(kFittedTiles, p.m, p.n, p.k, p.tn, kAtOnce);
  return (p.m <= kFewRows ? fitted_few_rows(p, of) : of.us) + copied;
}

// b is read from memory once, and from the L2 once for every 16 rows of a.
double any_columns(const Product& p) {
  if (p.tn || !has_unaligned_rows(p) || p.m > 64) return INFINITY;
  const double bytes = 2.0 * p.n * p.k, groups = (p.m + 15) / 16;
  return 6 + std::max(bytes / kOfMemory, groups * bytes / kOfL2);
}

// A block has all rows and one N-slice, the narrowest of which all blocks run at once (`launch_strips` of strips.cuh). With up
// to 64 rows two blocks with the widest slices share an SM.
double one_wave(const Product& p) {
  if (p.m > 128 || p.n % 8 != 0 || p.k % 8 != 0) return INFINITY;
  const bool few = p.m <= kFewRows;
  const int sms = kAtOnce[0];
  const auto blocks = [&](int slice) { return (p.n + slice - 1) / slice; };
  int slice = 0, on_sm = 1;
  for (const int width : {32, 48, 64, 112, 128})
    if (slice == 0 && (p.tn ? width != 128 : width % 64 == 0) && blocks(width) <= sms) slice = width;
  if (slice == 0) {
    on_sm = few ? 2 : 1, slice = 256 / on_sm;
    if (const int wide = 224 / on_sm; p.tn && (blocks(wide) <= sms * on_sm || blocks(slice) > sms * on_sm)) slice = wide;
  }
  const int at_once = sms * on_sm, waves = (blocks(slice) + at_once - 1) / at_once, steps = (p.k + 63) / 64;
  const double idle = 1 - std::min(1.0, double(blocks(slice)) / at_once);
  if (few) {
    const double missing = waves > 1 ? double(waves) * at_once / blocks(slice) - 1 : 0;
    const double step = 173.0 * (blocks(slice) > sms ? 2.024 : 1) * (1 + 0.3658 * idle);
    return of_few_rows(p, p.tn ? 5.493 : 4.992, waves * steps * step / kCyclesPerUs, 4.393e6, missing, 0.1328);
  }
  const double area = 128.0 * slice, products = area / 32 * 0.522, arrive = ((p.m + 7) / 8 * 8 + slice) * 128 / 186.9;
  const double step = (std::sqrt(std::sqrt(fourth(products) + fourth(arrive))) + 118.8) * (1 - 0.0723 * idle);
  const double body = waves * (steps * step + 4412 + 0.0791 * area) / kCyclesPerUs;
  return 3.76 + std::cbrt(cube(body) + cube(bytes_of(p) / 4.156e6));
}

// Equally high tiles of up to 128 rows, and the narrowest N-slices of which all run at once (v21_row_pairs.cu). If even the
// widest need several waves, the time is infinite: the model was fitted to one wave. A step takes the 4-norm of three times: of
// its multiply-adds, of its operands on their way to one multiprocessor, and of the L2, which sends operands to all blocks.
double row_pairs(const Product& p) {
  if (p.m <= 128 || p.m > 1024 || p.n % 8 != 0 || p.k % 8 != 0) return INFINITY;
  const int down = (p.m + 127) / 128, high = (p.m + down * 16 - 1) / (down * 16) * 16;
  const auto blocks = [&](int slice) { return down * ((p.n + slice - 1) / slice); };
  int slice = 0;
  for (const int width : {64, 80, 96, 112, 128, 144, 160, 192, 224, 256})
    if (slice == 0 && (p.tn || width == 64 || width % 128 == 0) && blocks(width) <= kAtOnce[0]) slice = width;
  if (slice == 0) return INFINITY;
  const bool pairs = down % 2 == 0;  // which share an N-slice
  const double area = 128.0 * slice, bytes = 128 * (high + (pairs ? slice / 2.0 : slice));
  const double longest = fourth(area / 32 * 1.094) + fourth(bytes / 112.5) + fourth(blocks(slice) * bytes / 7277);
  const double step = (std::sqrt(std::sqrt(longest)) + (pairs ? 0 : 7.1)) * (p.tn ? 1 : 0.975);
  return 4.96 + ((p.k + 63) / 64 * step + 1031 + 0.135 * area) / kCyclesPerUs;
}

// The smallest tiles of which all run at once; where k is long, two blocks below each other share columns of b
// (v14_small.cu). Fitted with up to 512 rows, but above 128 the choice gained nothing by it. Rows of tiles that lie outside of
// the matrix take time, too.
double small(const Product& p) {
  if (p.m <= kFewRows || p.m > 128 || p.n % 8 != 0 || p.k % 8 != 0) return INFINITY;
  struct Tile {
    int rows, cols;
    bool pair;
  };
  constexpr Tile kTiles[] = {{64, 64, false},  {64, 128, false}, {128, 128, false}, {128, 192, false},
                             {64, 64, true},   {64, 96, true},   {64, 128, true}};
  for (const Tile& tile : kTiles) {
    if ((p.k > 2048 && !tile.pair) || (!p.tn && tile.cols == 96)) continue;
    const int down = (p.m + tile.rows - 1) / tile.rows, blocks = down * ((p.n + tile.cols - 1) / tile.cols);
    if (blocks > kAtOnce[0]) continue;
    const int high = std::min(tile.rows, p.m), outside = down > 1 ? down * tile.rows - p.m : 0;
    const double to_sm = 128.0 * (high + tile.cols), of_l2 = 128 * (high + tile.cols / (tile.pair ? 2.0 : 1));
    const double longest = fourth(tile.rows * tile.cols / 32.0 * 0.917) + fourth(to_sm / 90.05 + 1.86 * outside) +
                           fourth(blocks * of_l2 / 6312);
    const double step = (std::sqrt(std::sqrt(longest)) - 27.6) * (p.tn ? 1 : 0.978);
    const double body = ((p.k + 63) / 64 * step + 3075) / kCyclesPerUs;
    return 4.46 + std::cbrt(cube(body) + cube(bytes_of(p) / 5.08e6));
  }
  return INFINITY;
}

// A pair of blocks has tiles of 256 x 256, and those of the last wave are divided (`deal_out` of v14_stream_k.cu). With fewer
// tiles than pairs, some pairs would have nothing to do.
double stream_k(const Product& p) {
  if (p.m <= 128 || p.n % 8 != 0 || p.k % 8 != 0) return INFINITY;
  const int64_t tiles = int64_t((p.m + 255) / 256) * ((p.n + 255) / 256), steps = (p.k + 63) / 64, clusters = kAtOnce[1];
  if (tiles < clusters) return INFINITY;
  const int64_t whole = tiles / clusters, rest = tiles % clusters, waves = whole + (rest > 0);
  double of_pair = double(waves * steps), dealt = 0;
  if (whole > 0 && rest > 0 && rest <= 2 * (clusters - rest)) {
    const int64_t helpers = std::min(clusters - rest, std::max<int64_t>(1, int64_t(std::sqrt(steps / 1.5)) - 1) * rest);
    const double each = double(rest) / helpers, takes = 1.5 * (1 + 1 / each), gives = 2 * (1 + each);
    const double own = std::max(1.0, std::ceil((steps * each + gives - takes) / (1 + each)));
    if (own + takes < steps - 1) of_pair = whole * steps + own + takes, dealt = 2.34;
  }
  const double body = 1024 * of_pair / kCyclesPerUs * 1.194 + 0.112 * waves + dealt;
  // Up to 512 rows the second form is up to 17 % too high.
  if (p.m <= 512) return 4.54 + std::sqrt(std::sqrt(fourth(body) + fourth(bytes_of(p) / 5.215e6 + 2.84)));
  return 4.54 + std::cbrt(cube(body) + cube(bytes_of(p) / 3.416e6 + 2.84));
}

struct Model {
  const char* kernel;
  double (*us)(const Product&);
};

// Of equal times the first is taken.
constexpr Model kModels[] = {
    {"v18_fitted", fitted},     {"v17_one_wave", one_wave},       {"v21_row_pairs", row_pairs},
    {"v14_stream_k", stream_k}, {"v20_any_columns", any_columns}, {"v15_gemv", gemv},       {"v14_small", small},
};

}  // namespace
}  // namespace minfer

// The kernel that takes the least time by these models.
extern "C" const char* minfer_fastest_product(int m, int n, int k, int tn) {
  const minfer::Product product{m, n, k, tn != 0};
  const char* fastest = minfer::kModels[0].kernel;
  double least = INFINITY;
  for (const minfer::Model& model : minfer::kModels)
    if (const double us = model.us(product); us < least) fastest = model.kernel, least = us;
  return fastest;
}

// Writes these times of hgemm's kernels, least first, and v18_fitted's tile, as a text of at most `size` bytes.
extern "C" void minfer_product_times(int m, int n, int k, int tn, char* text, int size) {
  const minfer::Product product{m, n, k, tn != 0};
  std::array<std::pair<double, const char*>, std::size(minfer::kModels)> times;
  for (size_t i = 0; i < times.size(); ++i) times[i] = {minfer::kModels[i].us(product), minfer::kModels[i].kernel};
  std::sort(times.begin(), times.end());
  int at = 0;
  const auto write = [&](auto... what) { at += std::snprintf(text + at, std::max(0, size - at), what...); };
  for (const auto& [us, kernel] : times) {
    if (us == INFINITY || at >= size) continue;
    write("%s%s %.1f us", at > 0 ? ", " : "", kernel, us);
    if (kernel != minfer::kModels[0].kernel || n % 8 != 0) continue;  // its tiles for other n have no model
    const minfer::FittedChoice of = minfer::choose_fitted(minfer::kFittedTiles, m, n, k, tn != 0, minfer::kAtOnce);
    write(" (tiles of %d x %d, k in %d part%s)", of.tile.rows, of.tile.cols, of.parts, of.parts > 1 ? "s" : "");
  }
}
