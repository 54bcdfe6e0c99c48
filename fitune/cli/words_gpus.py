"""The words of `fitune gpus` with a job, in English and Chinese, side by side so that neither can be forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.groups import LANGUAGES

_WORDS: dict[str, tuple[str, str]] = {
    "title": ("Which GPU for {model}, {method}", "哪块 GPU 适合：{model}，{method}"),
    "job": ("{records} records{file}: {tokens} tokens, {epochs}, {steps} steps of {batch}",
            "{records} 条记录{file}：{tokens} 个 token，{epochs}，共 {steps} 步，每步 {batch} 条"),
    "job_tokens": ("{tokens} tokens, {epochs}, {steps} steps of {batch} records of {seq_len} tokens",
                   "{tokens} 个 token，{epochs}，共 {steps} 步，每步 {batch} 条、每条 {seq_len} 个 token"),
    "job_unit": ("No --data and no --tokens: time and cost are per million tokens",
                 "没有给出 --data 或 --tokens：时间和费用按每一百万 token 计"),
    "of_file": (" of {file}", "（{file}）"),
    "epoch": ("1 epoch", "1 轮"),
    "epochs": ("{n:g} epochs", "{n:g} 轮"),
    "comma": (", ", "，"),
    "semicolon": ("; ", "；"),
    "estimated": ("{model}'s tokenizer is not on this machine: tokens are guessed from characters ({low} to {high} %)",
                  "本机没有 {model} 的分词器：token 数按字符数估算（{low} 至 {high} %）"),
    "sampled": ("Tokens were counted in the first rows only ({n:,} records); the rest is taken to be like them",
                "只统计了开头的 {n:,} 条记录，其余按同样长度推算"),
    "left_out": ("Left out, because fitune does not run there (they need torch_npu): {cards}",
                 "未列入（需要 torch_npu，fitune 不支持）：{cards}"),
    "limits": ("Limits: {limits}. {within} of {all} choices keep to them",
               "限制：{limits}。{all} 个选择中有 {within} 个满足"),
    "max_cost": ("at most {cost}", "费用不超过 {cost}"),
    "max_hours": ("at most {hours}", "时间不超过 {hours}"),
    "cheapest": ("Cheapest to rent", "租用最便宜"),
    "fastest": ("Fastest to rent", "租用最快"),
    "own": ("Cheapest to own", "购买最便宜"),
    "pick_rent": ("{gpus} at {provider}: {hours}, {cost} ({price} an hour{spot})",
                  "{gpus}，{provider}：{hours}，{cost}（每小时 {price}{spot}）"),
    "pick_own": ("{gpus}: {hours}; about {price} when it came out{year}{even}",
                 "{gpus}：{hours}；上市价约 {price}{year}{even}"),
    "pick_even": (", as much as {hours} of renting one", "，相当于租用 {hours} 的费用"),
    "and_spot": (", {price} spot", "，竞价 {price}"),
    "gpu": ("GPU", "GPU"),
    "memory": ("GiB each", "每卡 GiB"),
    "rate": ("tokens/s", "token/秒"),
    "time": ("time", "时间"),
    "rent": ("rent", "租金"),
    "at": ("{provider} at {price} an hour", "{provider} 每小时 {price}"),
    "at_spot": ("{provider} at {price} an hour, spot only", "{provider} 竞价每小时 {price}"),
    "own_table": ("fitune's table", "fitune 自带价格表"),
    "rows": ("{n} rows at a time", "每次 {n} 行"),
    "row": ("1 row at a time", "每次 1 行"),
    "recompute_none": ("nothing recomputed", "不重算"),
    "recompute_all": ("all layers recomputed", "全部层重算"),
    "recompute_some": ("{n} of {all} layers recomputed", "{all} 层中重算 {n} 层"),
    "streamed": ("{n} of {all} layers streamed", "{all} 层中流式加载 {n} 层"),
    "shared_batch": ("each card {n} of {batch} records", "每卡 {batch} 条中的 {n} 条"),
    "buy": ("buy: about {price}{even}", "购买：约 {price}{even}"),
    "buy_even": (" = {hours} of renting", " = 租用 {hours}"),
    "providers": ("The cheapest way to do it at each provider{limited}", "各平台最便宜的做法{limited}"),
    "providers_limited": (", within the limits", "（满足限制）"),
    "provider": ("provider", "平台"),
    "per_hour": ("an hour", "每小时"),
    "spot": ("spot", "竞价"),
    "this_job": ("this job", "本任务"),
    "on_spot": ("on spot", "竞价时"),
    "price": ("price is", "价格来源"),
    "no_price": ("no price known", "无价格"),
    "free": ("free", "免费"),
    "doubt_legend": ("? = recalled, converted or old price: look it up before you rely on it",
                     "? = 凭记忆、换算或过时的价格：使用前请核实"),
    "speed_legend": ("~ = speed from a data sheet, never measured with fitune; ranges say how far it may be off",
                     "~ = 速度由规格推算，未用 fitune 实测；括号内为可能范围"),
    "table": ("Prices: {name}, {date}, in {currency}; --prices FILE takes your own, --json names every source",
              "价格：{name}，{date}，单位 {currency}；--prices FILE 可换成你自己的价格表，--json 列出全部来源"),
    "order": ("Order: firm prices by cost, then doubtful ones, then no price by time; several cards share the records",
              "排序：先按可靠价格的费用，再按存疑价格，最后无价格者按时间；多卡分担记录"),
    "setup": ("On top: setting up and fetching the model{size}. Electricity is not counted",
              "另需：环境准备和下载模型{size}。未计电费"),
    "fetch": (" ({size})", "（{size}）"),
    "more": ("{n} more: --top {all}, or --json", "还有 {n} 个：--top {all} 或 --json"),
    "beyond": ("Beyond the limits", "超出限制"),
    "nothing_within": ("Nothing keeps to the limits. The nearest:", "没有满足限制的选择。最接近的："),
    "too_small": ("Too small (it needs at least {need}): {cards}", "显存不够（至少需要 {need}）：{cards}"),
    "and_more": (" and {n} more", " 等，另有 {n} 种"),
    "none": ("No single GPU of the catalog can do this job: {gpu}, the largest, has {has}; it needs {need}.",
             "目录中没有单块 GPU 能完成此任务：最大的 {gpu} 有 {has}，而至少需要 {need}。"),
    "none_why": ("Cards do not pool their memory in this version's advice: each holds the whole plan. By plain "
                 "division these would hold it between them: {several}.",
                 "本版本的建议不合并多卡显存：每块卡都要放下整个计划。仅按容量相除，合起来放得下的有：{several}。"),
    "none_alone": ("Cards do not pool their memory in this version's advice: each holds the whole plan.",
                   "本版本的建议不合并多卡显存：每块卡都要放下整个计划。"),
    "would_fit": ("Would fit there", "在那里可行"),
    "minutes": ("{low} to {high} min", "{low}–{high} 分钟"),
    "minute": ("{n} min", "{n} 分钟"),
    "hour": ("{n} h", "{n} 小时"),
    "day": ("{n} days", "{n} 天"),
    "range": (" ({low} to {high})", "（{low}–{high}）"),
    "full": ("full fine-tuning", "全参数微调"),
    "year": (" ({year})", "（{year} 年）"),
    "AMD: ROCm build of torch, not tested with fitune": (
        "AMD: ROCm build of torch, not tested with fitune", "AMD：需 ROCm 版 torch，未用 fitune 测试"),
    "needs torch's CUDA 12.6 build, the last one for this card": (
        "needs torch's CUDA 12.6 build, the last one for this card", "需要 CUDA 12.6 版 torch（支持此卡的最后一版）"),
    "fp16 with loss scaling": ("fp16 with loss scaling", "fp16（损失缩放）"),
    "memory shared with the processor; not tested": (
        "memory shared with the processor; not tested", "与处理器共享内存；未测试"),
    "laptop: clock and speed depend on its power limit": (
        "laptop: clock and speed depend on its power limit", "笔记本：频率和速度取决于功耗限制"),
    "verified": ("read {year}", "已核 {year}"),
    "partly verified": ("part read {year}", "部分已核 {year}"),
    "secondary": ("3rd party {year}", "第三方 {year}"),
    "recalled": ("recalled", "凭记忆"),
    "doubtful": ("doubtful", "存疑"),
    "yours": ("yours", "你的"),
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """Looks up a word in one language; a key that is none is shown as it is."""

    lang: str = "en"

    def __call__(self, key: str, **values: object) -> str:
        pair = _WORDS.get(key)
        text = pair[LANGUAGES.index(self.lang)] if pair else key
        return text.format(**values) if values else text
